-- Statements on domains and the owners of queues, on version 6 of line `riverpy`.
--
-- Only the server's clock is used. A queue gets another owner only under `owner_lock`. An operator who moves a queue
-- also takes the locks of `domain_lock…` before, so that no leader has a fenced transaction open during the change.


-- name: owner_read
-- The domain of each queue, the domain's last heartbeat (to compare it later), and whether the heartbeat is old by the
-- server's clock. That clock may have been set, so an old heartbeat proves nothing. A leader reads this in each pass,
-- without a fence. So it may be outdated when the leader uses it, and for a moment two leaders maintain one queue. All
-- statements of leaders allow that.
select
  queue, domain, timestamptz_send(last_seen_at), last_seen_at < now() - @orphaned_after::interval
from /* schema */ riverpy_queue_owner
order by queue;


-- name: owner_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_queue_owner') is not null;


-- name: owner_is_empty
-- Whether the table is empty: no row was written since it was created, or a vacuum has emptied it. This needs no
-- right to read the table.
select pg_relation_size(
  to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_queue_owner')
) = 0;


-- name: owner_lock
-- Lock the owners of all queues until the end of the transaction.
select pg_advisory_xact_lock(
  hashtextextended('riverpy domains ' || /* schema of riverpy_queue_owner */ current_schema()::text, 0)
);


-- name: owner_conflicts
-- The given queues that a domain owns, the clients of that domain with a recent heartbeat by the server's clock,
-- and its other clients, except for those whose last heartbeat is the given one: they are known to be dead.
select
  owner.queue, owner.domain,
  array(
    select client_id
    from /* schema */ riverpy_client
    where domain = owner.domain and heartbeat_at between now() - dead_after and now() + dead_after
    order by client_id
    limit 10
  ) as client_ids,
  array(
    select client.client_id
    from /* schema */ riverpy_client as client
    left join unnest(@client_id::text[], @heartbeat::bytea[]) as dead (client_id, heartbeat)
      on dead.client_id = client.client_id and dead.heartbeat = timestamptz_send(client.heartbeat_at)
    where client.domain = owner.domain and dead.client_id is null
      and client.heartbeat_at not between now() - client.dead_after and now() + client.dead_after
    order by client.client_id
    limit 10
  ) as maybe_dead_client_ids
from /* schema */ riverpy_queue_owner as owner
where owner.queue = any(@queue::text[])
order by owner.queue;


-- name: owner_claim
-- In a transaction after owner_lock. Make the domain the owner of these queues, and return those that it did not own.
insert into /* schema */ riverpy_queue_owner as owner (queue, domain, claimed_by)
select queue, @domain::text, @client_id::text
from unnest(@queue::text[]) as queue
order by queue
on conflict (queue) do update set
  domain = excluded.domain, claimed_by = excluded.claimed_by, claimed_at = now(), last_seen_at = now()
where owner.domain <> excluded.domain
returning queue;


-- name: owner_notify
-- Notify the leaders, at the commit, that queues have another owner.
select pg_notify(
  /* schema of river_job */ current_schema()::text || '.riverpy_event', json_build_object('action', @action::text)::text
)
where (select pg_notification_queue_usage() < 0.9);


-- name: member_update
-- Write a client's domain and maintenance settings and the domain's heartbeat, and return the owners of the given
-- queues. A leader may write at the same time: of an owner's row only the heartbeat changes. One client writes it for
-- the whole domain, after half of the interval, or when it is in the future because the server's clock was set back. A
-- row that another client is writing is skipped.
with said as (
  update /* schema */ riverpy_client
  set domain = @domain::text, settings = @settings::text
  where client_id = @client_id::text
    and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond'
    and (domain, settings) is distinct from (@domain::text, @settings::text)
), quiet as materialized (
  select queue
  from /* schema */ riverpy_queue_owner
  where domain = @domain::text and last_seen_at not between now() - @interval::interval / 2 and now()
  order by queue
  for no key update skip locked
), seen as (
  update /* schema */ riverpy_queue_owner as owner
  set last_seen_at = now()
  from quiet
  where owner.queue = quiet.queue
)
select owner.queue, owner.domain
from /* schema */ riverpy_queue_owner as owner
where owner.queue = any(@queue::text[]);


-- name: member_mark_supports_domains
-- Write that a client of `default` is of a version that supports domains. A leader may write at the same time: this
-- changes only the client's own row.
update /* schema */ riverpy_client
set settings = 'default'
where client_id = @client_id::text and domain = 'default' and settings is null
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: domain_election_status
-- The leader of `default` and whether it is a riverpy client; whether this domain has a leader, or a client with a
-- recent heartbeat by the server's clock that takes part in its leader election; and whether the leader of `default`
-- is of a version that supports domains.
select
  leader.leader_id,
  to_char(/* finite */ (leader.elected_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as elected_at,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (select from /* schema */ riverpy_lease where name = @lease::text and expires_at >= now())
    or exists (
      select from /* schema */ riverpy_client as client
      where domain = @domain::text and candidate and heartbeat_at between now() - dead_after and now() + dead_after
        and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping'
    ) as has_candidate,
  exists (
    select from /* schema */ riverpy_client where client_id = leader.leader_id and settings is not null
  ) as supports_domains
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: default_leader
-- Whether `default` has a leader, and whether that is a riverpy client.
select
  count(*) > 0 as is_led,
  coalesce(
    bool_or(exists (select from /* schema */ riverpy_client where client_id = leader.leader_id)), false
  ) as is_registered
from /* schema */ river_leader as leader
where leader.name = 'default' and leader.expires_at >= now();


-- name: domain_leaders
-- The current or last leader of each domain and holder of the schema's lease. Null times: it was released. A null
-- epoch: River's own row, which has none. Clients of versions that support domains have settings.
select
  'default' as domain, leader.leader_id as holder, null::bigint as epoch,
  /* finite */ (leader.elected_at), /* finite */ (leader.expires_at),
  extract(epoch from /* finite */ (leader.expires_at) - now())::float8 as remaining,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (
    select from /* schema */ riverpy_client where client_id = leader.leader_id and settings is not null
  ) as supports_domains
from /* schema */ river_leader as leader
where leader.name = 'default'
union all
select
  case when lease.name = @schema_lease::text then lease.name else substr(lease.name, 3) end,
  lease.holder, lease.epoch, /* finite */ (lease.acquired_at),
  /* finite */ (nullif(lease.expires_at, '-infinity')),
  extract(epoch from /* finite */ (nullif(lease.expires_at, '-infinity')) - now())::float8,
  exists (select from /* schema */ riverpy_client where client_id = lease.holder), true
from /* schema */ riverpy_lease as lease
where lease.name = @schema_lease::text or starts_with(lease.name, 'd:')
order by 1;


-- name: domain_owners
-- The owner of each queue, and the seconds since the last heartbeat of the domain.
select
  queue, domain, claimed_by, /* finite */ (claimed_at), /* finite */ (last_seen_at),
  extract(epoch from now() - /* finite */ (last_seen_at))::float8 as silent
from /* schema */ riverpy_queue_owner
order by queue;


-- name: domain_members
-- The clients with a recent heartbeat by the server's clock, and their domains. A stopping client takes part in no
-- leader election. The row is read as jsonb, because columns may be missing.
select
  client_id, domain, queues, kinds,
  candidate and coalesce(to_jsonb(client) ->> 'state', '') <> 'stopping' as candidate,
  settings, extract(epoch from now() - /* finite */ (started_at))::float8 as running,
  coalesce(to_jsonb(client) ->> 'state', '') = 'stopping' as is_stopping
from /* schema */ riverpy_client as client
where heartbeat_at between now() - dead_after and now() + dead_after
order by started_at, client_id
limit 10000;


-- name: domain_lock_default
-- Wait until the leader of `default` has no fenced transaction open. Until the end of this transaction the leader can
-- neither open a fenced transaction nor renew its lease.
select from /* schema */ river_leader where name = 'default' for update;


-- name: domain_lock_leases
-- Wait as domain_lock_default does for other domains, by the names of their leases. They are locked in one order, so
-- that two sessions cannot deadlock.
select from /* schema */ riverpy_lease where name = any(@name::text[]) order by name for update;


-- name: domain_queue_ownership
-- The owner of a queue, or null; the number of its clients with a recent heartbeat; whether a row, a client or a job
-- names the queue; and whether a client or a queue belongs to the domain that is to get the queue.
select
  owner.domain,
  (
    select count(*) from /* schema */ riverpy_client
    where domain = owner.domain and heartbeat_at between now() - dead_after and now() + dead_after
  ) as live_clients,
  owner.queue is not null
    or exists (select from /* schema */ river_queue where name = given.queue)
    or exists (select from /* schema */ riverpy_client where given.queue = any(queues))
    or exists (select from /* schema */ river_job where state = 'available' and queue = given.queue) as is_queue_known,
  given.domain = 'default'
    or exists (select from /* schema */ riverpy_client where domain = given.domain)
    or exists (select from /* schema */ riverpy_queue_owner where domain = given.domain) as is_domain_known
from (select @queue::text as queue, @domain::text as domain) as given
left join /* schema */ riverpy_queue_owner as owner on owner.queue = given.queue;


-- name: domain_own
-- In a transaction after owner_lock. Make a domain the owner of a queue. This is no heartbeat: the domain's own last
-- heartbeat counts. A domain without one gets an old time, so that its queues count as orphaned, and the leader of
-- `default` maintains them until its clients start.
insert into /* schema */ riverpy_queue_owner as owner (queue, domain, claimed_by, last_seen_at)
select
  @queue::text, @domain::text, @by::text,
  coalesce(
    greatest(
      (select max(last_seen_at) from /* schema */ riverpy_queue_owner where domain = @domain::text),
      (select max(heartbeat_at) from /* schema */ riverpy_client where domain = @domain::text)
    ),
    now() - @orphaned_after::interval
  )
on conflict (queue) do update set
  domain = excluded.domain, claimed_by = excluded.claimed_by, claimed_at = now(), last_seen_at = excluded.last_seen_at;


-- name: domain_free
-- Make `default` the owner of a queue again.
delete from /* schema */ riverpy_queue_owner where queue = @queue::text;
