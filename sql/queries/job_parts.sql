-- Parts of the statements that read and change jobs.


-- name: columns
-- The columns of a whole job, in the order of riverpy.job.JobColumn.
id, args::text, attempt, timestamptz_send(attempted_at), attempted_by, timestamptz_send(created_at), errors::text[],
timestamptz_send(finalized_at), kind, max_attempts, metadata::text, priority, queue, state::text,
timestamptz_send(scheduled_at), tags::text[], unique_key, unique_states::int;


-- name: cancel_mark
-- The object that marks the metadata of a cancelled job, as `mark`.
select jsonb_build_object(
  'cancel_attempted_at',
  rtrim(rtrim(to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z'
) as mark;


-- name: cancelled_values
-- The new values of a cancelled `job`. `given` has the mark. Metadata of a running job that are no object are moved
-- under a key, so that the mark can be one.
state = case when job.state = 'running' then job.state else 'cancelled' end,
finalized_at = case when job.state = 'running' then null else now() end,
metadata = case
  when jsonb_typeof(job.metadata) = 'object' then job.metadata || given.mark
  when job.state = 'running' then jsonb_build_object('riverpy:metadata', job.metadata) || given.mark
  else job.metadata
end;


-- name: retried_values
-- The new values of a retried `job`. It does not expire.
state = 'available',
finalized_at = null,
scheduled_at = now(),
max_attempts = least(job.max_attempts + case when job.attempt = job.max_attempts then 1 else 0 end, 32767),
metadata = case
  when jsonb_typeof(job.metadata) = 'object'
  then job.metadata - 'cancel_attempted_at' - 'riverpy:expires_at'
  else job.metadata
end;


-- name: claimed_values
-- The new values of a claimed `job`. The attempt number stays at the maximum of its type: it is the last attempt then.
-- A waiting job may have an old cancel mark, which River in Go leaves at a retry.
state = 'running',
attempt = least(job.attempt + 1, 32767),
attempted_at = now(),
attempted_by = array_append(
  job.attempted_by[greatest(array_length(job.attempted_by, 1) - 98, 1):], @client_id::text
),
metadata = case
  when job.metadata -> 'cancel_attempted_at' is not null
  then job.metadata - 'cancel_attempted_at'
  else job.metadata
end;


-- name: claimed_columns
-- The columns of a claimed `job`, in the order of riverpy.job.JobColumn, for a connection that reads timestamps as
-- integers. Most jobs have no tags, and only their claim in `attempted_by`. These arrays are null then, because each
-- array costs the client time and memory; see `Attempt.claimed_row`.
job.id, job.args::text, job.attempt, job.attempted_at,
case when array_length(job.attempted_by, 1) > 1 then job.attempted_by end,
job.created_at, job.errors::text[], job.finalized_at, job.kind, job.max_attempts, job.metadata::text, job.priority,
job.queue, 'running', job.scheduled_at, nullif(job.tags, '{}'), job.unique_key, job.unique_states::int;


-- name: due_message
-- Channel and payload of a notification that a job of `queue` is due. The sender notifies of each such job.
/* schema of river_job */ current_schema()::text || '.river_insert',
'{"queue": "' || queue || '", "notify_interval_ms": 0}';


-- name: due_later_message
-- Channel and payload of a notification that jobs of `queue` become due in the given `seconds`. No other notification
-- comes at that time.
/* schema of river_job */ current_schema()::text || '.riverpy_event',
json_build_object('action', 'due', 'queue', queue, 'seconds', json_agg(seconds order by seconds))::text;


-- name: due_in_half_seconds
-- The seconds until a `job` is due, rounded up to half a second, so that many jobs cause few claims.
(ceil(2 * extract(epoch from /* finite */ (job.scheduled_at) - now())) / 2)::float8;


-- name: insert_message
-- Channel and payload of a notification of inserted jobs. For the interval, the sender may insert more jobs without a
-- notification; see `NotificationMessage`. River in Go ignores this key.
/* schema of river_job */ current_schema()::text || '.river_insert',
'{"queue": "' || queue || '", "notify_interval_ms": ' || @notify_interval::cstring::text || '}';
