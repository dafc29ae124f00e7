-- Statements on River's table of leaders, for its one domain `default`.
--
-- A term is (leader_id, elected_at). Only the server's clock is compared. At the instant of the expiry the holder wins.


-- name: leader_elect
-- Bid. A free row is taken over, a missing one is made; a held one answers who holds it and for how many seconds more.
-- The row is locked only if it has expired, so that a denied bid waits for nobody; FOR UPDATE, so that it does wait for
-- a transaction that is fenced by the old term. No row at all: somebody else made it just now.
with expired as materialized (
  select leader.name, leader.elected_at
  from /* schema */ river_leader as leader
  where leader.name = 'default' and leader.expires_at < now()
  for update
), taken as (
  update /* schema */ river_leader as leader
  set
    leader_id = @leader_id::text,
    elected_at = case
      when expired.elected_at between now() and now() + interval '1 year'
      then /* finite */ (expired.elected_at) + interval '1 microsecond'
      else now()
    end,
    expires_at = now() + @ttl::interval
  from expired
  where leader.name = expired.name
  returning leader.elected_at
), made as (
  insert into /* schema */ river_leader (name, leader_id, elected_at, expires_at)
  select 'default', @leader_id::text, now(), now() + @ttl::interval
  where not exists (select from /* schema */ river_leader where name = 'default')
  on conflict do nothing
  returning elected_at
)
select true as elected, @leader_id::text as leader_id, elected_at, null::float8 as remaining
from (select elected_at from taken union all select elected_at from made) as won
union all
select
  false, leader.leader_id, /* finite */ (leader.elected_at),
  extract(epoch from /* finite */ (leader.expires_at) - now())::float8
from /* schema */ river_leader as leader
where leader.name = 'default' and leader.expires_at >= now();


-- name: leader_renew
-- Extend a term that has not expired. No row: it is over.
update /* schema */ river_leader
set expires_at = now() + @ttl::interval
where name = 'default' and leader_id = @leader_id and elected_at = @elected_at and expires_at >= now()
returning true;


-- name: leader_resign
-- End a term and tell the followers, who hear it at the commit. No row: it was over before.
with resigned as (
  delete from /* schema */ river_leader
  where name = 'default' and leader_id = @leader_id and elected_at = @elected_at
  returning leader_id
)
select case
  when (select pg_notification_queue_usage() < 0.9)
  then pg_notify(
    /* schema of river_leader */ current_schema()::text || '.river_leadership',
    json_build_object('leader_id', leader_id, 'action', 'resigned')::text
  )
end
from resigned;


-- name: leader_fence
-- Let the transaction around this go on only under a term that is held, and keep the term from passing to another until
-- its end: renewals pass a key share lock, takeovers wait for it. The server ends a transaction whose client is gone.
-- The limits are the transaction's own, for a pooler passes none of a session on; they are set before the row is locked,
-- and a shorter one of the session stays. No row: the term is over.
with limits as materialized (
  -- include: fence.fence_limits
)
select
  -- include: fence.fence_settings
from /* schema */ river_leader as leader
cross join limits
where name = 'default' and leader_id = @leader_id and elected_at = @elected_at::cstring::text::timestamptz
  and expires_at >= clock_timestamp()
for key share of leader;


-- name: leader_get
-- Who leads, or led last: times, and the seconds until the lease expires.
select
  leader_id, /* finite */ (elected_at), /* finite */ (expires_at),
  extract(epoch from /* finite */ (expires_at) - now())::float8 as remaining
from /* schema */ river_leader
where name = 'default';


-- name: leader_request_resign
-- Ask whoever leads to resign, as River does.
select pg_notify(
  /* schema of river_leader */ current_schema()::text || '.river_leadership',
  json_build_object('leader_id', '', 'action', 'request_resign')::text
)
where (select pg_notification_queue_usage() < 0.9);
