-- Text that the statements that insert jobs share.


-- name: insert_begin
with notified as (
  -- include: river_notification.insert_notify
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
);


-- name: on_conflict
-- The predicate of the partial index is spelled out: with a parameter in it, a generic plan would not find the index.
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state);


-- name: columns
-- The columns of a job in the order of riverpy.job.JobColumn.
int8out(job.id), jsonb_out(job.args), int2out(job.attempt), textout(encode(timestamptz_send(job.attempted_at), 'hex')),
job.attempted_by, textout(encode(timestamptz_send(job.created_at), 'hex')), job.errors::text[],
textout(encode(timestamptz_send(job.finalized_at), 'hex')), textout(job.kind), int2out(job.max_attempts),
jsonb_out(job.metadata), int2out(job.priority), textout(job.queue), enum_out(job.state),
textout(encode(timestamptz_send(job.scheduled_at), 'hex')), job.tags::text[], textout(encode(job.unique_key, 'hex')),
bit_out(job.unique_states);


-- name: metadata_with_expiry
-- The metadata of a given job, with the time at which it expires.
case
  when given.expires_in is null then given.metadata::jsonb
  else given.metadata::jsonb || jsonb_build_object(
    'riverpy:expires_at',
    to_char(
      (now() + given.expires_in::bigint * interval '1 microsecond') at time zone 'UTC',
      'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
    )
  )
end;
