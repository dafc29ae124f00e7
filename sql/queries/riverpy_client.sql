-- Statements on our table of clients.
--
-- Whether a client is dead is never decided by the server's clock alone: an observer reads heartbeats and measures by its
-- own clock how long each stays the same. Heartbeats cross as the bytes of timestamptz_send, to be compared, since some of
-- the connections have a codec of their own for timestamps.


-- name: client_register
-- Register a run under an id that no other run has; nothing is returned if one has it. Safe beside a leader: it inserts
-- the client's own row alone.
insert into /* schema */ riverpy_client (client_id, queues, kinds, candidate, poll_only, version, dead_after, started_at)
values (
  @client_id::text, @queues::text[], @kinds::text[], @candidate::boolean, @poll_only::boolean, @version::text,
  @dead_after::interval, now()
)
on conflict (client_id) do nothing
returning timestamptz_send(started_at);


-- name: client_registered_run
-- Which run has an id. Through jsonb, since the column of the process may not be there.
select
  timestamptz_send(started_at), timestamptz_send(heartbeat_at), extract(epoch from dead_after)::float8,
  to_char(/* finite */ (started_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), to_jsonb(client) ->> 'process',
  heartbeat_at between now() - dead_after and now() + dead_after, timestamptz_send(pg_postmaster_start_time())
from /* schema */ riverpy_client as client
where client_id = @client_id::text;


-- name: client_delete_dead
-- Delete the row of a run that is gone, unless it has written a heartbeat since that one was read. Safe beside a leader:
-- one that has locked the row to rescue its jobs ends first.
delete from /* schema */ riverpy_client
where client_id = @client_id::text and timestamptz_send(heartbeat_at) = @heartbeat::bytea;


-- name: client_heartbeat
-- Write a heartbeat of a run, which inserts its row again if it was deleted; nothing is returned if another run has
-- registered under the id. Safe beside a leader: it changes the client's own row alone. It touches no other table, or a
-- lock there would stop the heartbeats.
insert into /* schema */ riverpy_client as client (
  client_id, queues, kinds, candidate, poll_only, version, dead_after, started_at
)
values (
  @client_id::text, @queues::text[], @kinds::text[], @candidate::boolean, @poll_only::boolean, @version::text,
  @dead_after::interval, timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond'
)
on conflict (client_id) do update set
  queues = excluded.queues,
  kinds = excluded.kinds,
  candidate = excluded.candidate,
  poll_only = excluded.poll_only,
  version = excluded.version,
  dead_after = excluded.dead_after,
  heartbeat_at = clock_timestamp()
where client.started_at = excluded.started_at
returning true;


-- name: client_is_current
-- Whether a run still has its id.
select exists (
  select from /* schema */ riverpy_client
  where client_id = @client_id::text
    and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond'
);


-- name: client_set_slots
-- Say how many slots the client has in each of its queues, and which of its jobs are stuck. Safe beside a leader: it
-- changes the client's own row alone.
update /* schema */ riverpy_client
set slots = @slots::integer[], stuck = @stuck::bigint[]
where client_id = @client_id::text
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: client_set_state
-- Write whether the client is stopping, in which process it runs, and the rows that it has set aside: how many, and the
-- given ones, each with the seconds since it was set aside. Safe beside a leader: it changes the client's own row alone.
update /* schema */ riverpy_client
set
  state = @state::text,
  process = @process::text,
  set_aside = case
    when @aside_count::bigint > 0 then jsonb_build_object('count', @aside_count::bigint, 'rows', (
      select jsonb_agg(jsonb_build_object(
        'what', given.what, 'row', given.name, 'error', given.error, 'tries', given.tries,
        'since', to_char((now() - given.age * interval '1 second') at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
      ) order by given.place)
      from unnest(@what::text[], @name::text[], @error::text[], @tries::bigint[], @age::float8[])
        with ordinality as given (what, name, error, tries, age, place)
    ))
  end
where client_id = @client_id::text
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: election_status
-- Who leads, whether that is a client of ours, and whether one of ours takes part in leader election and has a recent
-- heartbeat, by the server's clock.
select
  leader.leader_id,
  to_char(/* finite */ (leader.elected_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as elected_at,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (
    select from /* schema */ riverpy_client as client
    where candidate and heartbeat_at between now() - dead_after and now() + dead_after
      and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping'
  ) as has_candidate
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: client_unregister
-- Take back the registration of a run that left nothing behind. Safe beside a leader: it is the client's own row, and
-- a row of a later run under the same id stays; so does that of a run whose lease was not released, or it would be taken
-- for a leader of another language.
delete from /* schema */ riverpy_client as client
where client_id = @client_id
  and timestamptz_send(started_at) = int8send(@registered_at::bigint)
  and not exists (
    select from /* schema */ river_leader where leader_id = client.client_id and expires_at >= now()
  );


-- name: client_heartbeats
-- The last heartbeat of each client, with its own limit in seconds, and when the server was started.
select
  client_id, timestamptz_send(heartbeat_at), extract(epoch from dead_after)::float8,
  timestamptz_send(pg_postmaster_start_time())
from /* schema */ riverpy_client;


-- name: client_lock_dead
-- Which of the given clients still have the heartbeat that was found to be their last, on a server that has not been
-- restarted since. They can write none until the end of the transaction. A row that is locked is being written. Fenced by
-- the transaction around it.
select client.client_id
from unnest(@client_id::text[], @heartbeat::bytea[]) as seen (client_id, heartbeat)
join /* schema */ riverpy_client as client on client.client_id = seen.client_id
where timestamptz_send(client.heartbeat_at) = seen.heartbeat
  and timestamptz_send(pg_postmaster_start_time()) = @server_start::bytea
order by client.client_id
for update of client skip locked;


-- name: client_registered
-- Which of the given clients give signs of life, or gave them until their death.
select client_id
from /* schema */ riverpy_client
where client_id = any(@client_id::text[]);


-- name: client_candidates
-- Which clients take part in the leader election of a domain: those with a recent heartbeat, by the server's clock, that
-- are not stopping. Through jsonb, since the columns may not be there.
select client_id, version, /* finite */ (started_at), /* finite */ (heartbeat_at)
from /* schema */ riverpy_client as client
where candidate and heartbeat_at between now() - dead_after and now() + dead_after
  and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping'
  and coalesce(to_jsonb(client) ->> 'domain', 'default') = @domain::text
order by started_at, client_id;


-- name: client_count
-- How many clients have a recent heartbeat, by the server's clock.
select count(*)
from /* schema */ riverpy_client
where heartbeat_at between now() - dead_after and now() + dead_after;


-- name: client_delete_idle
-- Forget clients whose heartbeat is still the given one and that have no running job: those of others are still to be
-- rescued by the row. Fenced by the transaction around it.
with gone as materialized (
  select client.client_id
  from unnest(@client_id::text[], @heartbeat::bytea[]) as seen (client_id, heartbeat)
  join /* schema */ riverpy_client as client on client.client_id = seen.client_id
  where timestamptz_send(client.heartbeat_at) = seen.heartbeat
    and client.client_id not in (
      select job.attempted_by[array_upper(job.attempted_by, 1)]
      from /* schema */ river_job as job
      where job.state = 'running' and job.attempted_by[array_upper(job.attempted_by, 1)] is not null
    )
  order by client.client_id
  for update of client skip locked
)
delete from /* schema */ riverpy_client as client
using gone
where client.client_id = gone.client_id
returning client.client_id;
