package main

import (
	"context"
	"fmt"
	"reflect"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// listParams are the params of a list or a deletion of jobs.
type listParams struct {
	IDs        []int64              `json:"ids"`
	Kinds      []string             `json:"kinds"`
	Queues     []string             `json:"queues"`
	Priorities []int16              `json:"priorities"`
	States     []rivertype.JobState `json:"states"`
	TagsAll    []string             `json:"tags_all"`
	TagsAny    []string             `json:"tags_any"`
	Metadata   string               `json:"metadata"`
	Order      string               `json:"order"`
	Descending bool                 `json:"descending"`
	Limit      *int                 `json:"limit"`
	After      string               `json:"after"`
	UnsafeAll  bool                 `json:"unsafe_all"`
}

var orders = map[string]river.JobListOrderByField{
	"id":           river.JobListOrderByID,
	"time":         river.JobListOrderByTime,
	"scheduled_at": river.JobListOrderByScheduledAt,
	"finalized_at": river.JobListOrderByFinalizedAt,
}

// river returns the params in River's form. River panics at some that are not allowed.
func (p *listParams) river() (params *river.JobListParams, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("panic: %v", reason)
		}
	}()
	params = river.NewJobListParams()
	if p.Order != "" {
		direction := river.SortOrderAsc
		if p.Descending {
			direction = river.SortOrderDesc
		}
		params = params.OrderBy(orders[p.Order], direction)
	}
	if p.IDs != nil {
		params = params.IDs(p.IDs...)
	}
	if p.Kinds != nil {
		params = params.Kinds(p.Kinds...)
	}
	if p.Queues != nil {
		params = params.Queues(p.Queues...)
	}
	if p.Priorities != nil {
		params = params.Priorities(p.Priorities...)
	}
	if p.States != nil {
		params = params.States(p.States...)
	}
	params = withTags(params, "TagsAll", p.TagsAll)
	params = withTags(params, "TagsAny", p.TagsAny)
	if p.Metadata != "" {
		params = params.Metadata(p.Metadata)
	}
	if p.Limit != nil {
		params = params.First(*p.Limit)
	}
	if p.After != "" {
		cursor := &river.JobListCursor{}
		if err := cursor.UnmarshalText([]byte(p.After)); err != nil {
			return nil, err
		}
		params = params.After(cursor)
	}
	return params, nil
}

// withTags filters by tags, which River's older versions cannot.
func withTags(params *river.JobListParams, method string, tags []string) *river.JobListParams {
	if tags == nil {
		return params
	}
	call := reflect.ValueOf(params).MethodByName(method)
	if !call.IsValid() {
		panic(fmt.Sprintf("River 0.%d has no %s", minorVersion(), method))
	}
	return call.CallSlice([]reflect.Value{reflect.ValueOf(tags)})[0].
		Interface().(*river.JobListParams)
}

func (s *session) list(ctx context.Context, p *listParams) (any, error) {
	params, err := p.river()
	if err != nil {
		return nil, err
	}
	var page *river.JobListResult
	if s.tx != nil {
		page, err = s.client.JobListTx(ctx, s.tx, params)
	} else {
		page, err = s.client.JobList(ctx, params)
	}
	if err != nil {
		return nil, err
	}
	result := map[string]any{"jobs": rowsOf(page.Jobs), "cursor": nil}
	if page.LastCursor != nil {
		text, err := page.LastCursor.MarshalText()
		if err != nil {
			return nil, err
		}
		result["cursor"] = string(text)
	}
	return result, nil
}

func (p *listParams) riverDelete() (params *river.JobDeleteManyParams, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("panic: %v", reason)
		}
	}()
	params = river.NewJobDeleteManyParams()
	if p.UnsafeAll { // River refuses it behind a filter, and takes filters behind it
		params = params.UnsafeAll()
	}
	if p.IDs != nil {
		params = params.IDs(p.IDs...)
	}
	if p.Kinds != nil {
		params = params.Kinds(p.Kinds...)
	}
	if p.Queues != nil {
		params = params.Queues(p.Queues...)
	}
	if p.Priorities != nil {
		params = params.Priorities(p.Priorities...)
	}
	if p.States != nil {
		params = params.States(p.States...)
	}
	if p.Limit != nil {
		params = params.First(*p.Limit)
	}
	return params, nil
}

func (s *session) deleteMany(ctx context.Context, p *listParams) (any, error) {
	params, err := p.riverDelete()
	if err != nil {
		return nil, err
	}
	var result *river.JobDeleteManyResult
	if s.tx != nil {
		result, err = s.client.JobDeleteManyTx(ctx, s.tx, params)
	} else {
		result, err = s.client.JobDeleteMany(ctx, params)
	}
	if err != nil {
		return nil, err
	}
	return rowsOf(result.Jobs), nil
}

func rowsOf(jobs []*rivertype.JobRow) []row {
	rows := make([]row, len(jobs))
	for i, job := range jobs {
		rows[i] = rowOf(job)
	}
	return rows
}
