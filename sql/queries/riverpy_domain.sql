-- What an operator reads and changes of domains, on version 6 of line `riverpy`.
--
-- Only the server's clock is compared. By hand a queue gets another owner under the locks of `domain_lock…`, so that
-- nothing which a leader writes under its fence is under way at the switch, and then under `owner_lock`, as always.


-- name: domain_leads
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
