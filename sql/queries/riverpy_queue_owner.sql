-- Statements on our table of the owners of queues, as clients and leaders need them.
--
-- Only the server's clock is compared. A queue gets another owner under the lock of owner_lock alone.


-- name: owner_read
-- Whose the queues are that a domain has, and whether that domain has been without a sign of life for so long that
-- another keeps them. It is read at a leader's passes, and not fenced: what it says may be over when it is acted upon,
-- so that for a moment two leaders keep one queue, which all that they do allows.
select queue, domain, last_seen_at < now() - @orphaned_after::interval as is_orphaned
from /* schema */ riverpy_queue_owner
order by queue;


-- name: owner_is_there
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
-- Whose these queues are, if a domain has them, and which clients of that domain give signs of life.
select
  owner.queue, owner.domain,
  array(
    select client.client_id
    from /* schema */ riverpy_client as client
    where client.domain = owner.domain and client.heartbeat_at >= now() - client.dead_after
    order by client.client_id
    limit 10
  ) as client_ids
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


-- name: member_keep
-- Say whose a client is, how it would keep a domain, and that the domain is alive; tells whose the given queues are. Safe
-- beside a leader: of an owner's row nothing but the sign of life changes. One client for all of the domain gives that,
-- within half of the interval: a row that another is about to write is skipped.
with said as (
  update /* schema */ riverpy_client
  set domain = @domain::text, settings = @settings::text
  where client_id = @client_id::text
    and (domain, settings) is distinct from (@domain::text, @settings::text)
), quiet as materialized (
  select queue
  from /* schema */ riverpy_queue_owner
  where domain = @domain::text and last_seen_at < now() - @interval::interval / 2
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


-- name: member_forget
-- Let a client without a domain be of none, if a run of the same id before it was of one and left its row behind. Safe
-- beside a leader: it changes the client's own row alone.
update /* schema */ riverpy_client
set domain = 'default', settings = null
where client_id = @client_id::text and domain <> 'default';


-- name: member_mark
-- Say of a client of `default` that it knows of domains, as those of older versions do not. Safe beside a leader: it
-- changes the client's own row alone.
update /* schema */ riverpy_client
set settings = 'default'
where client_id = @client_id::text and domain = 'default' and settings is null;


-- name: domain_look
-- Who leads `default`, whether that is a client of ours; whether somebody leads this domain, or stands for that and
-- gives signs of life; and whether the leader of `default` says that it knows of domains.
select
  leader.leader_id,
  to_char(/* finite */ (leader.elected_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as elected_at,
  exists (select from /* schema */ riverpy_client where client_id = leader.leader_id) as is_registered,
  exists (select from /* schema */ riverpy_lease where name = @lease::text and expires_at >= now())
    or exists (
      select from /* schema */ riverpy_client
      where domain = @domain::text and candidate and heartbeat_at >= now() - dead_after
    ) as has_candidate,
  exists (
    select from /* schema */ riverpy_client where client_id = leader.leader_id and settings is not null
  ) as knows_domains
from (select) as always
left join /* schema */ river_leader as leader on leader.name = 'default' and leader.expires_at >= now();


-- name: default_led
-- Whether somebody leads `default`, and whether that is a client of ours.
select
  count(*) > 0 as is_led,
  coalesce(
    bool_or(exists (select from /* schema */ riverpy_client where client_id = leader.leader_id)), false
  ) as is_registered
from /* schema */ river_leader as leader
where leader.name = 'default' and leader.expires_at >= now();
