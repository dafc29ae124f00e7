-- Inserting jobs.
--
-- Values cross as cstring and text[] only, because a caller's connection may have its own codecs for every other type.
-- Timestamps and unique keys cross as hexadecimal digits of the wire format.


-- name: job_insert
-- Insert jobs that differ only in their args and unique keys.
-- include: insert_parts.insert_begin
select
  given.args::jsonb, @kind::cstring::text, @max_attempts::cstring::text::smallint, @metadata::cstring::text::jsonb,
  @priority::cstring::text::smallint, @queue::cstring::text,
  coalesce(@scheduled_at::cstring::text::timestamptz, now()), @state::cstring::text::/* schema */ river_job_state,
  string_to_array(@tags::cstring::text, ','), decode(given.unique_key, 'hex'),
  @unique_states::cstring::text::bit(8)
from unnest(@args::text[], @unique_key::text[]) as given (args, unique_key)
-- include: insert_parts.insert_end


-- name: job_insert_mixed
-- Insert jobs that differ in other values too.
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
-- include: insert_parts.insert_end


-- name: insert_now
-- The time of this transaction.
select textout(encode(timestamptz_send(now()), 'hex'));
