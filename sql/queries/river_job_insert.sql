-- Inserting jobs.
--
-- Values cross as cstring and text[] only, because a caller's connection may have its own codecs for every other type.
-- Timestamps and unique keys cross as hexadecimal digits of the wire format.
--
-- On a conflict the existing job is locked. The statements return the columns of each job, then whether the job
-- existed, then the number of notifications. The server sends the notifications because this number is read.


-- name: job_insert
-- Insert jobs that differ only in their args and unique keys. A duplicate is returned unchanged.
-- include: insert_parts.insert_begin
select
  given.args::jsonb, @kind::cstring::text, @max_attempts::cstring::text::smallint, @metadata::cstring::text::jsonb,
  @priority::cstring::text::smallint, @queue::cstring::text,
  coalesce(@scheduled_at::cstring::text::timestamptz, now()), @state::cstring::text::/* schema */ river_job_state,
  string_to_array(@tags::cstring::text, ','), decode(given.unique_key, 'hex'),
  @unique_states::cstring::text::bit(8)
from unnest(@args::text[], @unique_key::text[]) as given (args, unique_key)
-- include: insert_parts.on_conflict
do update set kind = job.kind
returning
  -- include: insert_parts.columns
  , boolout(job.xmax <> 0), (select int8out(count(*)) from notified);


-- name: job_insert_plain
-- Insert one job without a unique key, and notify its queue only. Without a CTE, a subquery and a conflict clause the
-- server needs less time, above all where the driver prepares no statement and the server plans it each time.
insert into /* schema */ river_job as job (
  -- include: insert_parts.plain_columns
)
-- include: insert_parts.one_job
returning
  -- include: insert_parts.columns
  -- include: insert_parts.own_notification
;


-- name: job_insert_mixed
-- Insert jobs that differ in other values too. A duplicate is returned unchanged.
-- include: insert_parts.insert_begin
select
  given.args::jsonb, given.kind, given.max_attempts::smallint, given.metadata::jsonb, given.priority::smallint,
  given.queue,
  coalesce(given.scheduled_at::timestamptz, now()), given.state::/* schema */ river_job_state,
  string_to_array(given.tags, ','), decode(given.unique_key, 'hex'), given.unique_states::bit(8)
from unnest(
  @args::text[], @kind::text[], @max_attempts::text[], @metadata::text[], @priority::text[], @queue::text[],
  @scheduled_at::text[], @state::text[], @tags::text[], @unique_key::text[], @unique_states::text[]
) as given (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
-- include: insert_parts.on_conflict
do update set kind = job.kind
returning
  -- include: insert_parts.columns
  , boolout(job.xmax <> 0), (select int8out(count(*)) from notified);


-- name: job_insert_one
-- The same over a connection of riverpy: no codecs of a caller apply, and timestamps are integers.
insert into /* schema */ river_job as job (
  -- include: insert_parts.plain_columns
)
-- include: insert_parts.one_job
returning
  -- include: insert_parts.raw_columns
  -- include: insert_parts.own_notification
;


-- name: job_insert_shared
-- Insert jobs of several calls without unique keys, over a connection of riverpy. It may notify other queues too. If a
-- trigger leaves a job out, callers would get the rows of others, so the cast of a text fails.
with notified as (
  -- include: river_notification.insert_notify
), stored as (
  insert into /* schema */ river_job as job (
    -- include: insert_parts.plain_columns
  )
  select
    -- include: insert_parts.plain_values
  from unnest(
    @args::text[], @expires_in::text[], @kind::text[], @metadata::text[], @queue::text[], @priority::text[],
    @max_attempts::text[], @state::text[], @tags::text[], @scheduled_at::text[]
  ) as given (args, expires_in, kind, metadata, queue, priority, max_attempts, state, tags, scheduled_at)
  returning job.*
)
select
  -- include: insert_parts.raw_columns
  , (select count(*) from notified), (
    select case
      when count(*) < cardinality(@args::text[])
      then ('riverpy: jobs left out by a trigger, stored: ' || count(*))::int
    end
    from stored
  )
from stored as job;


-- name: job_insert_general
-- Insert jobs of which some expire, or replace values of the existing job with their unique key. @replace is an object:
-- for each key, the names of the values to replace. An existing job is changed only while it waits. This is decided
-- from the locked row: a claim either has committed before, and the job is running, or skips the locked row. A
-- pending job stays pending. The time at which a job expires belongs to its due time. Replaced metadata keep the keys
-- of River and riverpy. A job's own queue is notified if the job is due now.
with replacements as materialized (
  select @replace::cstring::text::jsonb as by_unique_key
), stored as (
  insert into /* schema */ river_job as job (
    -- include: insert_parts.plain_columns
    , unique_key, unique_states
  )
  select
    -- include: insert_parts.plain_values
    , decode(given.unique_key, 'hex'), given.unique_states::bit(8)
  from unnest(
    @args::text[], @kind::text[], @max_attempts::text[], @metadata::text[], @priority::text[], @queue::text[],
    @scheduled_at::text[], @state::text[], @tags::text[], @unique_key::text[], @unique_states::text[],
    @expires_in::text[]
  ) as given (
    args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states,
    expires_in
  )
  -- include: insert_parts.on_conflict
  do update set (args, priority, scheduled_at, state, metadata) = (
    select
      case when chosen.names ? 'args' then excluded.args else job.args end,
      case when chosen.names ? 'priority' then excluded.priority else job.priority end,
      case when chosen.names ? 'scheduled_at' then due.at else job.scheduled_at end,
      case
        when chosen.names ? 'scheduled_at' and job.state <> 'pending'
        then case when due.at <= now() then 'available' else 'scheduled' end::/* schema */ river_job_state
        else job.state
      end,
      case
        when chosen.names is null or jsonb_typeof(job.metadata) <> 'object' then job.metadata
        else (
          case
            when chosen.names ? 'metadata' then excluded.metadata || (
              select coalesce(jsonb_object_agg(kept.key, kept.value), '{}')
              from jsonb_each(job.metadata) as kept
              where kept.key ~ '^(river:|riverpy:|snoozes$)'
            )
            else job.metadata
          end - 'riverpy:expires_at'
        ) || jsonb_strip_nulls(jsonb_build_object(
          'riverpy:expires_at',
          case when chosen.names ? 'scheduled_at' then excluded.metadata else job.metadata end -> 'riverpy:expires_at'
        ))
      end
    from (
      select case
        when job.state in ('available', 'pending', 'retryable', 'scheduled')
        then (select by_unique_key -> encode(excluded.unique_key, 'hex') from replacements)
      end as names
    ) as chosen
    cross join lateral (
      select least(
        excluded.scheduled_at,
        /* finite */ (job.created_at) + (chosen.names ->> 'max_wait')::bigint * interval '1 microsecond'
      ) as at
    ) as due
  )
  returning job.*, job.xmax <> 0 as existed
), notification_queue as materialized (
  select (select pg_notification_queue_usage() < 0.9) as has_room
), notified as (
  select pg_notify(
    -- include: job_parts.insert_message
  )
  from (
    select distinct queue
    from stored
    where state = 'available' and scheduled_at <= now() and (existed or queue = any(@notify::text[]))
  ) as waiting
  where cardinality(@notify::text[]) > 0 and (select has_room from notification_queue)
)
select
  -- include: insert_parts.columns
  , boolout(job.existed), (
    select int8out(case
      when count(*) >= 0 and (select has_room from notification_queue) then cardinality(@notify::text[])::bigint
      else 0
    end)
    from notified
  )
from stored as job;


-- name: insert_now
-- The time of this transaction.
select textout(encode(timestamptz_send(now()), 'hex'));
