-- Statements on our table of clients.
--
-- The server's clock alone never decides that a client is dead: an observer reads heartbeats, and measures on its own
-- clock how long each one stays the same. Heartbeats cross as the bytes of timestamptz_send, only to be compared,
-- because some connections have their own codec for timestamps.


-- name: client_register
-- Register a run under an id, unless another run has the id: then no row is returned. A leader may write at the
-- same time: this inserts only the client's own row.
insert into /* schema */ riverpy_client (client_id, queues, kinds, candidate, poll_only, version, dead_after, started_at)
values (
  @client_id::text, @queues::text[], @kinds::text[], @is_candidate::boolean, @poll_only::boolean, @version::text,
  @dead_after::interval, now()
)
on conflict (client_id) do nothing
returning timestamptz_send(started_at);


-- name: client_registered_run
-- The run that is registered under an id. The row is read as jsonb, because the column of the process may be missing.
select
  timestamptz_send(started_at), timestamptz_send(heartbeat_at), extract(epoch from dead_after)::float8,
  to_char(/* finite */ (started_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), to_jsonb(client) ->> 'process',
  heartbeat_at between now() - dead_after and now() + dead_after, timestamptz_send(pg_postmaster_start_time())
from /* schema */ riverpy_client as client
where client_id = @client_id::text;


-- name: client_delete_dead
-- Delete the row of a dead run, unless it has written another heartbeat since the given one was read. A leader may
-- write at the same time: a leader that has locked the row to rescue its jobs ends first.
delete from /* schema */ riverpy_client
where client_id = @client_id::text and timestamptz_send(heartbeat_at) = @heartbeat::bytea;


-- name: client_heartbeat
-- Write a heartbeat of a run. If its row was deleted, it is inserted again. No row is returned if another run is
-- registered under the id. A leader may write at the same time: this changes only the client's own row. It uses no
-- other table, because a lock there would stop the heartbeats. The column of the leases may be missing.
insert into /* schema */ riverpy_client as client (
  -- when leases: leases,
  client_id, queues, kinds, candidate, poll_only, version, dead_after, started_at
)
values (
  -- when leases: @leases::text::jsonb,
  @client_id::text, @queues::text[], @kinds::text[], @is_candidate::boolean, @poll_only::boolean, @version::text,
  @dead_after::interval, timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond'
)
on conflict (client_id) do update set
  -- when leases: leases = excluded.leases,
  queues = excluded.queues,
  kinds = excluded.kinds,
  candidate = excluded.candidate,
  poll_only = excluded.poll_only,
  version = excluded.version,
  dead_after = excluded.dead_after,
  heartbeat_at = clock_timestamp()
where client.started_at = excluded.started_at
returning true;


-- name: client_is_run_registered
-- Whether a run still has its id.
select exists (
  select from /* schema */ riverpy_client
  where client_id = @client_id::text
    and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond'
);


-- name: client_set_slots
-- Write the client's queues, its slots in each of them and its stuck jobs. A leader may write at the same time: this
-- changes only the client's own row.
update /* schema */ riverpy_client
set queues = @queues::text[], slots = @slots::integer[], stuck = @stuck::bigint[]
where client_id = @client_id::text
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: client_set_state
-- Write whether the client is stopping, its process, how many rows it has set aside, and the given ones of these, each
-- with the seconds since it was set aside. A leader may write at the same time: this changes only the client's own row.
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
-- The leader, whether it is a riverpy client, and whether a riverpy client of `default` with a recent heartbeat by the
-- server's clock takes part in leader election. The column `domain` may be missing before its migration.
select
  leader.leader_id,
  to_char(/* finite */ (leader.elected_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as elected_at,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (
    select from /* schema */ riverpy_client as client
    where candidate and heartbeat_at between now() - dead_after and now() + dead_after
      and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping'
      and coalesce(to_jsonb(client) ->> 'domain', 'default') = 'default'
  ) as has_candidate
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: client_unregister
-- Delete the row of a run that has left no running jobs. A leader may write at the same time: this is the client's own
-- row. The row of a later run under the same id stays. The row of a run that has not released the leader's lease stays
-- too, or the leader would look like a client of another language.
delete from /* schema */ riverpy_client as client
where client_id = @client_id
  and timestamptz_send(started_at) = int8send(@registered_at::bigint)
  and not exists (
    select from /* schema */ river_leader where leader_id = client.client_id and expires_at >= now()
  );


-- name: client_heartbeats
-- The last heartbeat of each client, its own limit in seconds, and the start time of the server.
select
  client_id, timestamptz_send(heartbeat_at), extract(epoch from dead_after)::float8,
  timestamptz_send(pg_postmaster_start_time())
from /* schema */ riverpy_client;


-- name: client_lock_dead
-- The given clients whose last heartbeat is still the given one, on a server that was not restarted since. Until the
-- end of the transaction these clients can write no heartbeat. A locked row is skipped: its heartbeat is being written.
-- The transaction around it is fenced.
select client.client_id
from unnest(@client_id::text[], @heartbeat::bytea[]) as seen (client_id, heartbeat)
join /* schema */ riverpy_client as client on client.client_id = seen.client_id
where timestamptz_send(client.heartbeat_at) = seen.heartbeat
  and timestamptz_send(pg_postmaster_start_time()) = @server_start::bytea
order by client.client_id
for update of client skip locked;


-- name: client_registered
-- The given clients that have a row, alive or dead.
select client_id
from /* schema */ riverpy_client
where client_id = any(@client_id::text[]);


-- name: client_candidates
-- The clients that take part in the leader election of a domain: those with a recent heartbeat by the server's clock
-- that are not stopping. The row is read as jsonb, because columns may be missing.
select client_id, version, /* finite */ (started_at), /* finite */ (heartbeat_at)
from /* schema */ riverpy_client as client
where candidate and heartbeat_at between now() - dead_after and now() + dead_after
  and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping'
  and coalesce(to_jsonb(client) ->> 'domain', 'default') = @domain::text
order by started_at, client_id;


-- name: client_lease_reports
-- What the clients with a recent heartbeat by the server's clock last reported about leases, and the age of their
-- heartbeats in seconds. The row is read as jsonb, because columns may be missing.
select
  client_id, version, /* finite */ (heartbeat_at) as heartbeat_at,
  extract(epoch from now() - /* finite */ (heartbeat_at))::float8 as silent,
  coalesce(to_jsonb(client) ->> 'state', '') = 'stopping' as is_stopping,
  to_jsonb(client) ->> 'leases' as leases
from /* schema */ riverpy_client as client
where heartbeat_at between now() - dead_after and now() + dead_after
order by started_at, client_id
limit @limit::bigint;


-- name: client_count
-- The number of clients with a recent heartbeat by the server's clock.
select count(*)
from /* schema */ riverpy_client
where heartbeat_at between now() - dead_after and now() + dead_after;


-- name: client_delete_idle
-- Delete the rows of clients whose last heartbeat is still the given one and that have no running job. A client with
-- running jobs keeps its row, because the rescue of the jobs needs it. The transaction around it is fenced.
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


-- name: client_list
-- The registered clients, dead ones last, and the age of their heartbeats in seconds by the server's clock. The columns
-- slots, stuck, state and set_aside may be missing, so they are read through jsonb.
select
  client_id, queues, kinds, candidate and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping' as candidate,
  poll_only, version,
  /* finite */ (started_at) as started_at,
  extract(epoch from now() - /* finite */ (started_at))::float8 as running,
  extract(epoch from now() - /* finite */ (heartbeat_at))::float8 as silent,
  extract(epoch from dead_after)::float8 as dead_after,
  coalesce(to_jsonb(client) ->> 'state', '') = 'stopping' as is_stopping,
  to_jsonb(client) ->> 'slots' as slots,
  to_jsonb(client) ->> 'stuck' as stuck,
  to_jsonb(client) ->> 'set_aside' as set_aside
from /* schema */ riverpy_client as client
order by heartbeat_at not between now() - dead_after and now() + dead_after, started_at, client_id
limit @limit::bigint;
