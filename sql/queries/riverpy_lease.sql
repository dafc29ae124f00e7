-- Statements on our table of leases. A term of one is (name, epoch), and an epoch is given once.
--
-- Only the server's clock is compared. At the instant of the expiry the holder wins. A lease that seems to last for more
-- than twice its time was granted before the server's clock was set back: it is free, for the holder, if it lives,
-- renews it by the new clock. What would go wrong by an old time, in a statement that has waited, asks the clock when it
-- goes on: a lease that was renewed meanwhile would seem to last for too long, and a late renewal would shorten it.


-- name: lease_acquire
-- Bid. A free row is taken over under a higher epoch, a missing one is made; a held one answers who holds it and for how
-- many seconds more. The row is locked only if it is free, so that a denied bid waits for nobody; FOR UPDATE, so that it
-- does wait for a transaction that is fenced by the old term, for so many milliseconds; 0: as the session has it. An
-- epoch is not below the server's clock in microseconds, so that epochs rise even where a failover has lost the last
-- ones. No row at all: somebody else took it just now. Times cross as numbers, since the connection may be the caller's
-- and have codecs for timestamps and intervals: the time of the lease in seconds, the begin of a term in microseconds.
with free as materialized (
  select
    lease.name,
    lease.epoch,
    case
      when @lock_milliseconds::bigint > 0 then set_config('lock_timeout', (@lock_milliseconds::bigint)::text, true)
    end
  from /* schema */ riverpy_lease as lease
  where lease.name = @name::text and (
      lease.expires_at < now() or lease.expires_at > clock_timestamp() + 2 * lease.ttl
    )
  for update
), taken as (
  update /* schema */ riverpy_lease as lease
  set
    epoch = greatest(free.epoch + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint),
    holder = @holder::text,
    ttl = make_interval(secs => @ttl::float8),
    acquired_at = now(),
    expires_at = now() + make_interval(secs => @ttl::float8)
  from free
  where lease.name = free.name
  returning lease.epoch, lease.acquired_at
), made as (
  insert into /* schema */ riverpy_lease (name, epoch, holder, ttl, expires_at)
  select
    @name::text, (extract(epoch from clock_timestamp()) * 1000000)::bigint, @holder::text, make_interval(secs => @ttl::float8),
    now() + make_interval(secs => @ttl::float8)
  where not exists (select from /* schema */ riverpy_lease where name = @name::text)
  on conflict do nothing
  returning epoch, acquired_at
)
select
  true as is_granted, @holder::text as holder, epoch, (extract(epoch from acquired_at) * 1000000)::bigint as acquired_at,
  null::float8 as remaining
from (select epoch, acquired_at from taken union all select epoch, acquired_at from made) as won
union all
select
  false, lease.holder, lease.epoch, (extract(epoch from /* finite */ (lease.acquired_at)) * 1000000)::bigint,
  extract(epoch from /* finite */ (lease.expires_at) - now())::float8
from /* schema */ riverpy_lease as lease
where lease.name = @name::text and lease.expires_at >= now() and lease.expires_at <= now() + 2 * lease.ttl;


-- name: lease_renew
-- Extend terms that have not expired, each by its own time; tells which, and which seem to go on in rows that somebody
-- keeps locked: these are not waited for, so that the others go on. A term that is not among them is over.
with free as materialized (
  select lease.name
  from unnest(@name::text[], @epoch::bigint[]) as given (name, epoch)
  join /* schema */ riverpy_lease as lease on lease.name = given.name and lease.epoch = given.epoch
  where lease.holder = @holder::text and lease.expires_at >= clock_timestamp()
  for no key update of lease skip locked
), renewed as (
  update /* schema */ riverpy_lease as lease
  set expires_at = clock_timestamp() + lease.ttl
  from free
  where lease.name = free.name
  returning lease.name
)
select name, true as is_renewed from renewed
union all
select lease.name, false
from unnest(@name::text[], @epoch::bigint[]) as given (name, epoch)
join /* schema */ riverpy_lease as lease on lease.name = given.name and lease.epoch = given.epoch
where lease.holder = @holder::text and lease.expires_at >= clock_timestamp()
  and lease.name not in (select free.name from free);


-- name: lease_release
-- End a term and tell those who wait for it, who hear it at the commit. A row that somebody keeps locked is waited for,
-- for so many milliseconds. No row: it was over before.
with own as materialized (
  select name, set_config('lock_timeout', (@lock_milliseconds::bigint)::text, true)
  from /* schema */ riverpy_lease
  where name = @name::text and epoch = @epoch::bigint and holder = @holder::text and expires_at >= now()
  for no key update
), released as (
  update /* schema */ riverpy_lease as lease
  set expires_at = '-infinity'
  from own
  where lease.name = own.name
  returning lease.name, lease.epoch, lease.holder
)
select case
  when (select pg_notification_queue_usage() < 0.9)
  then pg_notify(
    /* schema of riverpy_lease */ current_schema()::text || '.riverpy_lease',
    json_build_object('v', 1, 'lease', name, 'epoch', epoch, 'holder', holder, 'action', 'released')::text
  )
end
from released;


-- name: lease_fence
-- Let the transaction around this go on only under a term that is held, and keep the term from passing to another until
-- its end: renewals pass a key share lock, takeovers wait for it. Where the transaction has a snapshot the time of the
-- expiry may be an old one, and the epoch alone decides: none can be given while the lock is held. The limits are the
-- transaction's own, for a pooler passes none of a session on; they are set before the row is locked, and a shorter one
-- of the session stays. No row: the term is over.
--
-- False: the lock is that of a savepoint, and would go with it. The row tells who has locked it; where others have too,
-- or it was renewed just now, the locks of the session tell: a savepoint under which something is locked has an id.
with limits as materialized (
  -- include: fence.fence_limits
), held as materialized (
  select
    name,
    -- include: fence.fence_settings
  from /* schema */ riverpy_lease as lease
  cross join limits
  where name = @name::text and epoch = @epoch::bigint
    and (expires_at >= clock_timestamp() or current_setting('transaction_isolation') <> 'read committed')
  for key share of lease
)
select
  case
    when (
      select lease.xmax from /* schema */ riverpy_lease as lease where lease.name = held.name
    ) = pg_current_xact_id()::xid
    then true
    else not exists (
      select from pg_locks
      where locktype = 'transactionid' and pid = pg_backend_pid() and mode = 'ExclusiveLock'
        and transactionid <> pg_current_xact_id()::xid
    )
  end as is_outermost
from held;


-- name: lease_list
-- All leases, by name: times, and the seconds until each expires; null: it was released.
select
  name, epoch, holder, ttl, /* finite */ (acquired_at), /* finite */ (nullif(expires_at, '-infinity')) as expires_at,
  extract(epoch from /* finite */ (nullif(expires_at, '-infinity')) - now())::float8 as remaining
from /* schema */ riverpy_lease
order by name;


-- name: lease_request_resign
-- Ask the holder of a term to give it up, at the commit.
select case
  when (select pg_notification_queue_usage() < 0.9)
  then pg_notify(
    /* schema of riverpy_lease */ current_schema()::text || '.riverpy_lease',
    json_build_object('v', 1, 'lease', name, 'epoch', epoch, 'holder', holder, 'action', 'resign_requested')::text
  )
end
from /* schema */ riverpy_lease
where name = @name::text and expires_at >= now();
