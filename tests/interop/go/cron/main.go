// Command cron prints what robfig/cron, which River's documentation uses, makes of cron
// expressions: JSON lines with the next times after a fixed one, none for an expression that it
// refuses. `go run . > ../../../vectors/cron.jsonl` makes the vectors.
package main

import (
	"encoding/json"
	"os"
	"time"

	"github.com/robfig/cron/v3"
)

type line struct {
	Expression string      `json:"expression"`
	Next       []time.Time `json:"next"`
}

const times = 8

var after = time.Date(2026, 11, 28, 0, 0, 0, 0, time.UTC)

var days = []string{
	"*", "?", "*/1", "*/2", "*/10", "1", "13", "1,15", "1-7", "1-7/3", "10/5", "29-31", "31/2",
	"5-5/2", "1,*", "*/2,*", "*/10,3",
}

var weekdays = []string{
	"*", "?", "*/1", "*/2", "*/3", "*/6", "0", "MON", "sun", "1-5", "mon-fri/2", "1/3", "5/2",
	"6/1", "sat/2", "0,6", "1,*", "*/3,1",
}

var others = []string{
	"* * * * *", "*/15 * * * *", "5/20 * * * *", "10-30/10 * * * *", "0,30 * * * *",
	"1,,2 * * * *", ",7 * * * *", "59/5 * * * *", "*/7 */5 * * *", "? ? ? ? ?", "0 */2 ? * ?",
	"30 9 * * MON-FRI", "30 9 * jan,JUL *", "0 0 1 */3 *", "0 0 1 5/4 *", "0 0 1 12/1 *",
	"0 22-23 * 2-4 *", "0 0 29 2 *", "0 0 31 * *", "0 0 29 2 */2", "0 0 31 2 MON",
	"  0   0  *\t* *  ", "00 09 01 * *", "0 0 13 * 5", "0 0 */1 * 1", "*/40 */13 */20 */7 */5",
	"@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually",
	"", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *",
	"* * * 0 *", "* * * 13 *", "-1 * * * *", "5-1 * * * *", "1-2-3 * * * *", "1/2/3 * * * *",
	"*/0 * * * *", "*/x * * * *", "5-5/0 * * * *", "* * * * funday", "* * * january *", "@every",
	"@every 5x", "@reboot", "0 0 * * FRI-MON",
}

func main() {
	expressions := append([]string{}, others...)
	for _, day := range days {
		for _, weekday := range weekdays {
			expressions = append(expressions, "0 0 "+day+" * "+weekday)
		}
	}
	out := json.NewEncoder(os.Stdout)
	out.SetEscapeHTML(false)
	for _, expression := range expressions {
		found := line{Expression: expression}
		if schedule, err := cron.ParseStandard(expression); err == nil {
			at := after
			for range times {
				at = schedule.Next(at)
				found.Next = append(found.Next, at)
			}
		}
		if err := out.Encode(found); err != nil {
			panic(err)
		}
	}
}
