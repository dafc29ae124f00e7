package main

import (
	"encoding/hex"
	"time"

	"github.com/riverqueue/river/rivertype"
)

// row is a job under the names of the columns. Args and metadata are text, so that nothing is lost.
type row struct {
	ID           int64                    `json:"id"`
	State        rivertype.JobState       `json:"state"`
	Attempt      int                      `json:"attempt"`
	MaxAttempts  int                      `json:"max_attempts"`
	AttemptedAt  *time.Time               `json:"attempted_at"`
	CreatedAt    time.Time                `json:"created_at"`
	FinalizedAt  *time.Time               `json:"finalized_at"`
	ScheduledAt  time.Time                `json:"scheduled_at"`
	Priority     int                      `json:"priority"`
	Args         string                   `json:"args"`
	AttemptedBy  []string                 `json:"attempted_by"`
	Errors       []rivertype.AttemptError `json:"errors"`
	Kind         string                   `json:"kind"`
	Metadata     string                   `json:"metadata"`
	Queue        string                   `json:"queue"`
	Tags         []string                 `json:"tags"`
	UniqueKey    *string                  `json:"unique_key"`
	UniqueStates *int                     `json:"unique_states"`
}

var stateBits = map[rivertype.JobState]int{
	rivertype.JobStateAvailable: 1 << 0,
	rivertype.JobStateCancelled: 1 << 1,
	rivertype.JobStateCompleted: 1 << 2,
	rivertype.JobStateDiscarded: 1 << 3,
	rivertype.JobStatePending:   1 << 4,
	rivertype.JobStateRetryable: 1 << 5,
	rivertype.JobStateRunning:   1 << 6,
	rivertype.JobStateScheduled: 1 << 7,
}

func rowOf(job *rivertype.JobRow) row {
	result := row{
		ID:          job.ID,
		State:       job.State,
		Attempt:     job.Attempt,
		MaxAttempts: job.MaxAttempts,
		AttemptedAt: job.AttemptedAt,
		CreatedAt:   job.CreatedAt,
		FinalizedAt: job.FinalizedAt,
		ScheduledAt: job.ScheduledAt,
		Priority:    job.Priority,
		Args:        string(job.EncodedArgs),
		AttemptedBy: job.AttemptedBy,
		Errors:      job.Errors,
		Kind:        job.Kind,
		Metadata:    string(job.Metadata),
		Queue:       job.Queue,
		Tags:        job.Tags,
	}
	if job.UniqueKey != nil {
		key := hex.EncodeToString(job.UniqueKey)
		result.UniqueKey = &key
	}
	if job.UniqueStates != nil {
		mask := 0
		for _, state := range job.UniqueStates {
			mask |= stateBits[state]
		}
		result.UniqueStates = &mask
	}
	return result
}
