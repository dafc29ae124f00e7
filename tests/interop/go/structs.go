package main

import (
	"encoding/json"
	"fmt"

	"github.com/riverqueue/river"
)

// rawArgs are args whose JSON text is passed on (compacted and HTML-escaped, its order kept).
type rawArgs struct {
	kind string
	text json.RawMessage
}

func (a rawArgs) Kind() string                 { return a.kind }
func (a rawArgs) MarshalJSON() ([]byte, error) { return a.text, nil }

// anyArgs are args that were decoded to Go's own maps, lists and float64s.
type anyArgs struct {
	kind  string
	value any
}

func (a anyArgs) Kind() string                 { return a.kind }
func (a anyArgs) MarshalJSON() ([]byte, error) { return json.Marshal(a.value) }

// structKind gives all the structs below their kind.
type structKind struct{}

func (structKind) Kind() string { return "vec_kind" }

type plainArgs struct {
	structKind
	Z string `json:"z"`
	A int    `json:"a"`
	M bool   `json:"m"`
}

type oneArgs struct {
	structKind
	CustomerID int    `json:"customer_id" river:"unique"`
	Note       string `json:"note"`
}

type twoArgs struct {
	structKind
	Z    string `json:"z" river:"unique"`
	Note string `json:"note"`
	A    int    `json:"a" river:"unique"`
}

type omitArgs struct {
	structKind
	A    string `json:"a,omitempty" river:"unique"`
	B    string `json:"b,omitempty" river:"unique"`
	Note string `json:"note"`
}

type address struct {
	Street string `json:"street"`
	Zip    string `json:"zip" river:"unique"`
	City   string `json:"city" river:"unique"`
}

type nestedArgs struct {
	structKind
	Name string  `json:"name" river:"unique"`
	Addr address `json:"addr"`
	Note string  `json:"note"`
}

type nestedPointerArgs struct {
	structKind
	Name string   `json:"name" river:"unique"`
	Addr *address `json:"addr"`
}

type blob struct {
	Y int    `json:"y"`
	X string `json:"x"`
}

type wholeArgs struct {
	structKind
	Blob blob   `json:"blob" river:"unique"`
	Note string `json:"note"`
}

type wholeAndSubArgs struct {
	structKind
	Addr address `json:"addr" river:"unique"`
}

type mapArgs struct {
	structKind
	M map[string]any `json:"m" river:"unique"`
	N int            `json:"n"`
}

type sliceArgs struct {
	structKind
	L []int `json:"l" river:"unique"`
	N int   `json:"n"`
}

type noJSONArgs struct {
	structKind
	Customer string `river:"unique"`
	Note     string
}

// Embedded is exported because River walks exported fields only.
type Embedded struct {
	E1 string `json:"e1" river:"unique"`
	E2 string `json:"e2"`
}

type embeddedArgs struct {
	structKind
	Embedded
	Q string `json:"q" river:"unique"`
}

type dotArgs struct {
	structKind
	AB string `json:"a.b" river:"unique"`
	N  int    `json:"n"`
}

type floatArgs struct {
	structKind
	F float64 `json:"f" river:"unique"`
	I int64   `json:"i" river:"unique"`
	U uint64  `json:"u" river:"unique"`
}

type pointerArgs struct {
	structKind
	P *string `json:"p" river:"unique"`
	N int     `json:"n"`
}

type strArgs struct {
	structKind
	S string `json:"s" river:"unique"`
}

type multiArgs struct {
	structKind
	S string `json:"s" river:"sequence,unique"`
	T string `json:"t" river:"sequence"`
}

type numArgs struct {
	structKind
	First  string `json:"0" river:"unique"`
	Second string `json:"1" river:"unique"`
}

type plainNestedArgs struct {
	structKind
	O blob           `json:"o"`
	M map[string]int `json:"m"`
	A int            `json:"a"`
}

// decode returns args of a struct type by value, as River's reflection needs them.
func decode[T river.JobArgs](text []byte) (river.JobArgs, error) {
	var args T
	err := json.Unmarshal(text, &args)
	return args, err
}

var structs = map[string]func([]byte) (river.JobArgs, error){
	"plain":       decode[plainArgs],
	"one":         decode[oneArgs],
	"two":         decode[twoArgs],
	"omit":        decode[omitArgs],
	"nested":      decode[nestedArgs],
	"nestedptr":   decode[nestedPointerArgs],
	"whole":       decode[wholeArgs],
	"wholeandsub": decode[wholeAndSubArgs],
	"map":         decode[mapArgs],
	"slice":       decode[sliceArgs],
	"nojson":      decode[noJSONArgs],
	"emb":         decode[embeddedArgs],
	"dot":         decode[dotArgs],
	"float":       decode[floatArgs],
	"ptr":         decode[pointerArgs],
	"str":         decode[strArgs],
	"multi":       decode[multiArgs],
	"num":         decode[numArgs],
	"plainnested": decode[plainNestedArgs],
}

// argsOf makes args for the name of a struct, for "any" (decoded to Go's maps first), or raw ones.
func argsOf(name, kind string, text json.RawMessage) (river.JobArgs, error) {
	switch name {
	case "":
		return rawArgs{kind: kind, text: text}, nil
	case "any":
		args := anyArgs{kind: kind}
		err := json.Unmarshal(text, &args.value)
		return args, err
	}
	decode, ok := structs[name]
	if !ok {
		return nil, fmt.Errorf("no such struct: %q", name)
	}
	return decode(text)
}
