-- Statements on River's table of leaders. They use its row of the domain `default`.
--
-- (leader_id, elected_at) identifies a term. All statements compare times by the server's clock. At the exact instant of
-- the expiry the holder still has the lease.


-- name: leader_elect
-- Try to become leader. Updates an expired row, or inserts a missing one. If another client is the leader, returns its
-- id and the seconds until its lease expires. Returns no row if another client inserted the row at the same time.
--
-- Only an expired row is locked, so a denied attempt does not wait for a lock. FOR UPDATE makes an attempt that may
-- succeed wait for transactions that the old term has fenced.
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
-- Extend a term that has not expired. Returns no row if the term has ended.
update /* schema */ river_leader
set expires_at = now() + @ttl::interval
where name = 'default' and leader_id = @leader_id and elected_at = @elected_at and expires_at >= now()
returning true;


-- name: leader_resign
-- End a term and notify the other clients at the commit. Returns no row if the term had ended before.
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
-- Check that a term is held, and let no other client become leader until the transaction ends. The row gets a key share
-- lock: renewals do not wait for it, takeovers do. Returns no row if the term has ended.
--
-- The timeouts let the server end the transaction of a client that has gone. They are set for the transaction, because a
-- pooler does not keep settings of a session. They are set before the row is locked. A shorter timeout of the session
-- stays in effect.
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
-- Return the present or last leader, the times of its term, and the seconds until its lease expires.
select
  leader_id, /* finite */ (elected_at), /* finite */ (expires_at),
  extract(epoch from /* finite */ (expires_at) - now())::float8 as remaining
from /* schema */ river_leader
where name = 'default';


-- name: leader_request_resign
-- Notify the leader that it should resign. River sends the same message.
select pg_notify(
  /* schema of river_leader */ current_schema()::text || '.river_leadership',
  json_build_object('leader_id', '', 'action', 'request_resign')::text
)
where (select pg_notification_queue_usage() < 0.9);
