-- Statements on our table of the owners of queues, as clients and leaders need them.
--
-- Only the server's clock is compared. A queue gets another owner under the lock of owner_lock alone.


-- name: owner_read
-- Which domain has which queue, when a client of that domain last said that it is alive (only to be compared), and
-- whether that was long ago by the server's clock, which proves nothing. It is read at a leader's passes, and not fenced:
-- what it says may be over when it is acted upon, so that for a moment two leaders keep one queue, which all that they do
-- allows.
select
  queue, domain, timestamptz_send(last_seen_at), last_seen_at < now() - @orphaned_after::interval
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


-- name: member_keep
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


-- name: member_mark
-- Say of a client of `default` that it knows of domains, as those of older versions do not. Safe beside a leader: it
-- changes the client's own row alone.
update /* schema */ riverpy_client
set settings = 'default'
where client_id = @client_id::text and domain = 'default' and settings is null
  and started_at = timestamptz '2000-01-01 00:00:00+00' + @registered_at::bigint * interval '1 microsecond';


-- name: domain_look
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


-- name: default_led
-- Whether somebody leads `default`, and whether that is a client of ours.
select
  count(*) > 0 as is_led,
  coalesce(
    bool_or(exists (select from /* schema */ riverpy_client where client_id = leader.leader_id)), false
  ) as is_registered
from /* schema */ river_leader as leader
where leader.name = 'default' and leader.expires_at >= now();
