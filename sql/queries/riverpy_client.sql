-- Statements on our table of clients.
--
-- Only the server's clock is compared. Points in time cross as microseconds since 2000, since some of the connections
-- that beat have a codec of their own for timestamps.


-- name: client_beat
-- Give a sign of life; the first of a run registers it, and when that was is the answer. Safe beside a leader: it
-- changes the client's own row alone. It touches no other table, or a lock there would keep the client from living.
insert into /* schema */ riverpy_client as client (
  client_id, queues, kinds, candidate, poll_only, version, dead_after, started_at
)
values (
  @client_id::text, @queues::text[], @kinds::text[], @candidate::boolean, @poll_only::boolean, @version::text,
  @dead_after::interval,
  coalesce(timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond', now())
)
on conflict (client_id) do update set
  queues = excluded.queues,
  kinds = excluded.kinds,
  candidate = excluded.candidate,
  poll_only = excluded.poll_only,
  version = excluded.version,
  dead_after = excluded.dead_after,
  started_at = excluded.started_at,
  heartbeat_at = clock_timestamp()
returning timestamptz_send(started_at);


-- name: client_disclose
-- Say how many slots the client has in each of its queues, and which of its jobs are stuck. Safe beside a leader: it
-- changes the client's own row alone.
update /* schema */ riverpy_client
set slots = @slots::integer[], stuck = @stuck::bigint[]
where client_id = @client_id::text;


-- name: leader_look
-- Who leads, whether that is a client of ours, and whether one of ours stands for election and gives signs of life.
select
  leader.leader_id,
  to_char(/* finite */ (leader.elected_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as elected_at,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (
    select from /* schema */ riverpy_client where candidate and heartbeat_at >= now() - dead_after
  ) as has_candidate
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: client_leave
-- Take back the registration of a run that left nothing behind. Safe beside a leader: it is the client's own row, and
-- a row of a later run under the same id stays; so does that of a run whose lease was not released, or it would be taken
-- for a leader of another language.
delete from /* schema */ riverpy_client as client
where client_id = @client_id
  and timestamptz_send(started_at) = int8send(@registered_at::bigint)
  and not exists (
    select from /* schema */ river_leader where leader_id = client.client_id and expires_at >= now()
  );


-- name: client_silent
-- Which clients give no signs of life, and in how many seconds the next of the others may be one of them: null, if
-- there are no others.
with clients as (
  select
    client_id,
    extract(epoch from /* finite */ (heartbeat_at) - now() + greatest(dead_after, @dead_after::interval)) as silent_in
  from /* schema */ riverpy_client
)
select
  coalesce(array_agg(client_id) filter (where silent_in < 0), '{}'),
  min(silent_in) filter (where silent_in >= 0)::float8
from clients;


-- name: client_lock_dead
-- Which of the given clients are dead: no sign of life for as long as their own setting and the leader's say, and the
-- server was there for as long. They can give none until the end of the transaction. A row that is locked is being
-- given one. Fenced by the transaction around it.
select client_id
from /* schema */ riverpy_client
where client_id = any(@client_id::text[])
  and heartbeat_at < now() - greatest(dead_after, @dead_after::interval)
  and pg_postmaster_start_time() < now() - greatest(dead_after, @dead_after::interval)
  and greatest(dead_after, @dead_after::interval) <= @contact::float8 * interval '1 second'
order by client_id
for update skip locked;


-- name: client_registered
-- Which of the given clients give signs of life, or gave them until their death.
select client_id
from /* schema */ riverpy_client
where client_id = any(@client_id::text[]);


-- name: client_candidates
-- Who stands for election in a domain and gives signs of life. Through jsonb, since the column may not be there.
select client_id, version, /* finite */ (started_at), /* finite */ (heartbeat_at)
from /* schema */ riverpy_client as client
where candidate and heartbeat_at >= now() - dead_after
  and coalesce(to_jsonb(client) ->> 'domain', 'default') = @domain::text
order by started_at, client_id;


-- name: client_living
-- How many clients give signs of life.
select count(*) from /* schema */ riverpy_client where heartbeat_at >= now() - dead_after;


-- name: client_reap
-- Forget clients that are dead for long and have no running job: those of others are still to be rescued by the row.
-- Fenced by the transaction around it.
with gone as materialized (
  select client_id
  from /* schema */ riverpy_client
  where heartbeat_at < now() - greatest(dead_after, @dead_after::interval) - @kept::interval
    and client_id not in (
      select job.attempted_by[array_upper(job.attempted_by, 1)]
      from /* schema */ river_job as job
      where job.state = 'running' and job.attempted_by[array_upper(job.attempted_by, 1)] is not null
    )
  order by client_id
  for update skip locked
)
delete from /* schema */ riverpy_client as client
using gone
where client.client_id = gone.client_id
returning client.client_id;
