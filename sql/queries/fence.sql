-- Text that the two fences share: that of River's leader row and that of a lease. Each sets limits for its transaction,
-- so that a transaction whose client is gone ends in time. They are set per transaction, because a pooler passes no
-- setting of a session on. A shorter limit of the session stays.


-- name: fence_limits
-- The milliseconds that the transaction may still take: the least of the term's time, the session's own
-- transaction_timeout, and what an earlier fence of this transaction has left.
select greatest(1, least(
  @milliseconds::bigint,
  nullif(extract(epoch from current_setting('transaction_timeout', true)::interval) * 1000, 0)::bigint,
  nullif(current_setting('riverpy.fenced_until', true), '')::bigint
    - (extract(epoch from clock_timestamp()) * 1000)::bigint
)) as milliseconds;


-- name: fence_settings
-- Changing transaction_timeout does not restart its timer. Setting it to 0 first does.
set_config(
  'statement_timeout',
  least(
    nullif(extract(epoch from current_setting('statement_timeout')::interval) * 1000, 0), @milliseconds::bigint
  )::bigint::text,
  true
),
set_config(
  'lock_timeout',
  least(
    nullif(extract(epoch from current_setting('lock_timeout')::interval) * 1000, 0), @lock_milliseconds::bigint
  )::bigint::text,
  true
),
set_config(
  'idle_in_transaction_session_timeout',
  least(
    nullif(extract(epoch from current_setting('idle_in_transaction_session_timeout')::interval) * 1000, 0),
    @milliseconds::bigint
  )::bigint::text,
  true
),
case
  when current_setting('server_version_num')::int >= 170000
  then set_config(
    'transaction_timeout',
    case set_config('transaction_timeout', '0', true) when '0' then limits.milliseconds::text end,
    true
  )
end,
set_config(
  'riverpy.fenced_until',
  ((extract(epoch from clock_timestamp()) * 1000)::bigint + limits.milliseconds)::text,
  true
);
