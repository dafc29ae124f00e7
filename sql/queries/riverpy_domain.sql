-- What an operator reads and changes of domains, on version 6 of line `riverpy`.
--
-- Only the server's clock is compared. By hand a queue gets another owner under the locks of `domain_lock…`, so that
-- nothing which a leader writes under its fence is under way at the switch, and then under `owner_lock`, as always.


-- name: owner_read
-- Which domain has which queue, when a client of that domain last said that it is alive (only to be compared), and
-- whether that was long ago by the server's clock, which proves nothing. It is read at a leader's passes, and not fenced:
-- what it says may be over when it is acted upon, so that for a moment two leaders keep one queue, which all that they do
-- allows.
select
  queue, domain, timestamptz_send(last_seen_at), last_seen_at < now() - @orphaned_after::interval
from /* schema */ riverpy_queue_owner
order by queue;


-- name: owner_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_queue_owner') is not null;


-- name: owner_is_empty
-- Whether no row was ever written since the table was made, or emptied by a vacuum; which takes no right to read it.
select pg_relation_size(
  to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_queue_owner')
) = 0;


-- name: owner_lock
-- Let nobody else change whose queues are until the end of the transaction around this.
select pg_advisory_xact_lock(
  hashtextextended('riverpy domains ' || /* schema of riverpy_queue_owner */ current_schema()::text, 0)
);


-- name: owner_held
-- Which domain has these queues, if one has; which clients of that domain have a recent heartbeat, by the server's clock;
-- and which others it has, but for those whose heartbeat is the given one: they are known to be dead.
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
  ) as silent_ids
from /* schema */ riverpy_queue_owner as owner
where owner.queue = any(@queue::text[])
order by owner.queue;


-- name: owner_claim
-- Under owner_lock. Let these queues be the domain's; tells which were not.
insert into /* schema */ riverpy_queue_owner as owner (queue, domain, claimed_by)
select queue, @domain::text, @client_id::text
from unnest(@queue::text[]) as queue
order by queue
on conflict (queue) do update set
  domain = excluded.domain, claimed_by = excluded.claimed_by, claimed_at = now(), last_seen_at = now()
where owner.domain <> excluded.domain
returning queue;


-- name: owner_notify
-- Tell the leaders, at the commit, that queues have changed hands.
select pg_notify(
  /* schema of river_job */ current_schema()::text || '.riverpy_event', json_build_object('action', @action::text)::text
)
where (select pg_notification_queue_usage() < 0.9);


-- name: member_update
-- Say whose a client is, how it would keep a domain, and that the domain is alive; tells whose the given queues are. Safe
-- beside a leader: of an owner's row nothing but the sign of life changes. One client for all of the domain gives that,
-- within half of the interval, or when its time is in the future, since the server's clock was set back: a row that
-- another is about to write is skipped.
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


-- name: member_mark_aware
-- Say of a client of `default` that it knows of domains, as those of older versions do not. Safe beside a leader: it
-- changes the client's own row alone.
update /* schema */ riverpy_client
set settings = 'default'
where client_id = @client_id::text and domain = 'default' and settings is null
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: domain_election_status
-- Who leads `default`, whether that is a client of ours; whether a client leads this domain, or takes part in its leader
-- election and has a recent heartbeat, by the server's clock; and whether the leader of `default` says that it knows of domains.
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
  ) as knows_domains
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: default_leader
-- Whether somebody leads `default`, and whether that is a client of ours.
select
  count(*) > 0 as is_led,
  coalesce(
    bool_or(exists (select from /* schema */ riverpy_client where client_id = leader.leader_id)), false
  ) as is_registered
from /* schema */ river_leader as leader
where leader.name = 'default' and leader.expires_at >= now();


-- name: domain_leaders
-- Who leads each domain, or led it last, and who holds what the schema has one of; null: it was released, or the row is
-- River's own, which has no epoch. Clients that know of domains have settings.
select
  'default' as domain, leader.leader_id as holder, null::bigint as epoch,
  /* finite */ (leader.elected_at), /* finite */ (leader.expires_at),
  extract(epoch from /* finite */ (leader.expires_at) - now())::float8 as remaining,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (
    select from /* schema */ riverpy_client where client_id = leader.leader_id and settings is not null
  ) as knows_domains
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
-- Which queue is which domain's, and how many seconds ago a client of the domain gave a sign of life.
select
  queue, domain, claimed_by, /* finite */ (claimed_at), /* finite */ (last_seen_at),
  extract(epoch from now() - /* finite */ (last_seen_at))::float8 as silent
from /* schema */ riverpy_queue_owner
order by queue;


-- name: domain_members
-- Which clients have a recent heartbeat, by the server's clock, and their domains. One that is stopping takes part in no
-- leader election. Through jsonb, since the column may not be there.
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
-- Wait for what the leader of `default` writes under its fence, and let it begin nothing more until the end of the
-- transaction around this, nor renew: that is a matter of milliseconds.
select from /* schema */ river_leader where name = 'default' for update;


-- name: domain_lock_leases
-- The same of other domains, by the names of their leases. In one order, so that nobody waits for one who waits for him.
select from /* schema */ riverpy_lease where name = any(@name::text[]) order by name for update;


-- name: domain_queue
-- Whose a queue is, null: nobody's; how many clients of that domain give signs of life; whether anybody knows the queue;
-- and whether anybody knows the domain that it is to go to.
select
  owner.domain,
  (
    select count(*) from /* schema */ riverpy_client
    where domain = owner.domain and heartbeat_at between now() - dead_after and now() + dead_after
  ) as living,
  owner.queue is not null
    or exists (select from /* schema */ river_queue where name = given.queue)
    or exists (select from /* schema */ riverpy_client where given.queue = any(queues))
    or exists (select from /* schema */ river_job where state = 'available' and queue = given.queue) as is_known,
  given.domain = 'default'
    or exists (select from /* schema */ riverpy_client where domain = given.domain)
    or exists (select from /* schema */ riverpy_queue_owner where domain = given.domain) as is_domain_known
from (select @queue::text as queue, @domain::text as domain) as given
left join /* schema */ riverpy_queue_owner as owner on owner.queue = given.queue;


-- name: domain_own
-- Under owner_lock. Let a queue be a domain's. That is no sign of life: the domain's own last one counts, and one that
-- has none counts as silent for as long as makes its queues orphans, so that somebody keeps them until its clients start.
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
-- Give a queue back to `default`.
delete from /* schema */ riverpy_queue_owner where queue = @queue::text;
