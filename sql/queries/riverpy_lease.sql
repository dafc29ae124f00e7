-- Statements on our table of leases. (name, epoch) identifies a term of a lease. An epoch is used once.
--
-- All statements compare times by the server's clock. At the exact instant of the expiry the holder still has the lease.
-- If a lease expires later than twice its duration from now, the server's clock was set back after the lease was granted.
-- Such a lease counts as free: a holder that is alive renews it by the new clock.
--
-- A statement may wait for a lock, and now() is then an old time. clock_timestamp() is used where this would matter: a
-- lease that was renewed during the wait would seem to last too long, and a late renewal would shorten a lease.


-- name: lease_acquire
-- Try to acquire a lease. Updates a free row under a higher epoch, or inserts a missing one. If the lease is held,
-- returns its holder and the seconds until it expires. Returns no row if another session acquired it at the same time.
--
-- Only a free row is locked, so a denied attempt does not wait for a lock. FOR UPDATE makes an attempt that may succeed
-- wait for transactions that the old term has fenced, for at most `lock_milliseconds`. 0 keeps the session's timeout.
-- An epoch is at least the server's clock in microseconds. So epochs rise even if a failover has lost the last ones.
-- `ttl` is in seconds, and `acquired_at` in microseconds: they are numbers, because a connection of the user may have
-- codecs for timestamps and intervals.
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
-- Extend terms that have not expired, each by its own duration. Returns a row for each term that is still held.
-- `is_renewed` is false if another session has locked the row. The statement skips such rows, so that it can renew the
-- others without waiting. A term without a row in the result has ended.
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
-- End a term and notify the waiting clients at the commit. If another session has locked the row, waits for at most
-- `lock_milliseconds`. Returns no row if the term had ended before.
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
-- Check that a term is held, and let no other session acquire the lease until the transaction ends. The row gets a key
-- share lock: renewals do not wait for it, takeovers do. If the transaction already has a snapshot, the row's expiry may
-- be an old value. Then only the epoch is checked, since it cannot change while the lock is held. Returns no row if the
-- term has ended.
--
-- The timeouts let the server end the transaction of a client that has gone. They are set for the transaction, because a
-- pooler does not keep settings of a session. They are set before the row is locked. A shorter timeout of the session
-- stays in effect.
--
-- `is_outermost` is false inside a savepoint, because a rollback to the savepoint would remove the lock. The row's xmax
-- is the transaction that has locked it. If other transactions have locked it too, or it was renewed just now, pg_locks
-- decides: a savepoint that has locked a row has a transaction id of its own.
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
-- Return leases by name: all leases, those whose names start with a prefix, or one. With their times, the seconds until
-- they expire (null if the lease was released), and whether they have a holder by the rule of `lease_acquire`.
select
  name, epoch, holder, ttl, /* finite */ (acquired_at), /* finite */ (nullif(expires_at, '-infinity')) as expires_at,
  extract(epoch from /* finite */ (nullif(expires_at, '-infinity')) - now())::float8 as remaining,
  expires_at >= now() and expires_at <= now() + 2 * ttl as is_held
from /* schema */ riverpy_lease
where true
-- when name: and name = @name::text
-- when prefix: and starts_with(name, @prefix::text)
-- when expired_within: and expires_at > now() - @expired_within::interval
order by name
-- when limit: limit @limit::bigint
;


-- name: lease_terms
-- The current terms of these leases. Leases without a holder are left out.
select name, holder, epoch
from /* schema */ riverpy_lease
where name = any(@name::text[]) and expires_at >= now() and expires_at <= now() + 2 * ttl;


-- name: lease_request_resign
-- Notify the holder of a lease at the commit that it should release the lease. With an epoch, only the
-- holder of this term is notified. Returns no row if the lease has no such holder.
select case
  when (select pg_notification_queue_usage() < 0.9)
  then pg_notify(
    /* schema of riverpy_lease */ current_schema()::text || '.riverpy_lease',
    json_build_object('v', 1, 'lease', name, 'epoch', epoch, 'holder', holder, 'action', 'resign_requested')::text
  )
end
from /* schema */ riverpy_lease
where name = @name::text and expires_at >= now()
-- when epoch: and epoch = @epoch::bigint
;
