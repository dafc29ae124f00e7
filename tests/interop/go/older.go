package main

import (
	"fmt"
	"os"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/riverqueue/river"
)

// This leaves out what River's older versions lack, so that the tests can run with them:
// tests that need it then fail at an assertion.

// minorVersion is River's: 51 for v0.51.2.
func minorVersion() int {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if module.Path == "github.com/riverqueue/river" {
			minor, _ := strconv.Atoi(strings.Split(module.Version+"..", ".")[1])
			return minor
		}
	}
	panic("this program has no River")
}

func eventKinds() []river.EventKind {
	kinds := []river.EventKind{
		river.EventKindJobCancelled,
		river.EventKindJobCompleted,
		river.EventKindJobFailed,
		river.EventKindJobSnoozed,
		river.EventKindQueuePaused,
		river.EventKindQueueResumed,
	}
	if minorVersion() >= 44 {
		kinds = append(kinds, "job_interrupted")
	}
	return kinds
}

// setIfThere sets a switch of River's Config to the text of a flag.
func setIfThere(config *river.Config, name, text string) error {
	isOn, err := strconv.ParseBool(text)
	if err != nil {
		return err
	}
	field := reflect.ValueOf(config).Elem().FieldByName(name)
	if !field.IsValid() {
		fmt.Fprintf(os.Stderr, "River 0.%d has no %s\n", minorVersion(), name)
		return nil
	}
	field.SetBool(isOn)
	return nil
}
