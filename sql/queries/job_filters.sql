-- Parts of the statements that list and change jobs by filters.


-- name: job_filters
-- The conditions of the filters that are given. The text of an error is searched in the last error. Tags, priorities
-- and errors have no index. The states are literals: the planner cannot estimate how many rows the states of a
-- parameter have, and would not use the index for a rare state.
-- when ids: and id = any(@ids::bigint[])
-- when kinds: and kind = any(@kinds::text[])
-- when queues: and queue = any(@queues::text[])
-- when priorities: and priority = any(@priorities::smallint[])
-- when states: and state in (
-- when state_available: 'available',
-- when state_cancelled: 'cancelled',
-- when state_completed: 'completed',
-- when state_discarded: 'discarded',
-- when state_pending: 'pending',
-- when state_retryable: 'retryable',
-- when state_running: 'running',
-- when state_scheduled: 'scheduled',
-- when states: null)
-- when tags_all: and tags::text[] @> @tags_all::text[]
-- when tags_any: and tags::text[] && @tags_any::text[]
-- when metadata: and metadata @> @metadata::text::jsonb
-- when error: and strpos(errors[array_upper(errors, 1)] ->> 'error', @error::text) > 0


-- name: job_columns
-- The columns of a whole job, in the order of riverpy.job.JobColumn.
id, args::text, attempt, timestamptz_send(attempted_at), attempted_by, timestamptz_send(created_at), errors::text[],
timestamptz_send(finalized_at), kind, max_attempts, metadata::text, priority, queue, state::text,
timestamptz_send(scheduled_at), tags::text[], unique_key, unique_states::int
