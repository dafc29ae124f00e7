-- Statements on our table of executions, for run_once.
--
-- Only the server's clock is used. An epoch is not below that clock in microseconds, so that the epochs of a key rise
-- even if its row was deleted in between.
--
-- The connection may be the caller's and have codecs for all types but pseudo-types and text[]. So values cross as
-- cstring, and times as hexadecimal digits of the wire format.


-- name: exec_insert
-- Insert a key as completed in this transaction, and return the transaction's id. It waits for another transaction
-- with the key. No row: the key is there already.
insert into /* schema */ riverpy_exec (key, epoch, claimed_by, completed_at, kept_until)
values (
  @key::cstring::text, (extract(epoch from clock_timestamp()) * 1000000)::bigint, @claimed_by::cstring::text, now(),
  now() + @kept::cstring::text::interval
)
on conflict (key) do nothing
returning xid8out(pg_current_xact_id());


-- name: exec_claim
-- Claim a key for a time or, with null, for ever. An expired claim is replaced. No row: the key is completed or
-- claimed.
insert into /* schema */ riverpy_exec as exec (key, epoch, claimed_by, expires_at, kept_until)
values (
  @key::cstring::text, (extract(epoch from clock_timestamp()) * 1000000)::bigint, @claimed_by::cstring::text,
  now() + @expires_after::cstring::text::interval, now() + @kept::cstring::text::interval
)
on conflict (key) do update
set
  epoch = greatest(exec.epoch + 1, excluded.epoch),
  claimed_by = excluded.claimed_by,
  claimed_at = now(),
  expires_at = excluded.expires_at,
  kept_until = excluded.kept_until
where exec.completed_at is null and exec.expires_at < now()
returning int8out(exec.epoch);


-- name: exec_complete
-- Complete a claimed key. No row: another caller has claimed it.
update /* schema */ riverpy_exec
set completed_at = now(), kept_until = now() + @kept::cstring::text::interval
where key = @key::cstring::text and epoch = @epoch::cstring::text::bigint
returning textout(key);


-- name: exec_release
-- Release a claimed key, so that any caller can claim it at once.
update /* schema */ riverpy_exec
set expires_at = '-infinity'
where key = @key::cstring::text and epoch = @epoch::cstring::text::bigint;


-- name: exec_end
-- Mark a claim without an expiry whose function has ended without success. It stays, and looks to other callers like
-- the claim of a dead client.
update /* schema */ riverpy_exec
set expires_at = 'infinity'
where key = @key::cstring::text and epoch = @epoch::cstring::text::bigint and expires_at is null
  and completed_at is null;


-- name: exec_get
-- The stored state of a key. The claimant lives if it was registered when it claimed the key, and its heartbeat is
-- recent by its own limit. After a restart of the server the time begins again, because no client could write a
-- heartbeat before. A claimant that was not registered lives for a fixed time, or for the limit of a later client with
-- its id, if that is shorter. The transaction may be long, so its own time is the lower limit only.
select
  textout(exec.claimed_by), textout(encode(timestamptz_send(/* finite */ (exec.claimed_at)), 'hex')),
  boolout(exec.expires_at < 'infinity'), boolout(exec.completed_at is not null),
  boolout(exec.expires_at is null and exists (
    select
    from (
      select
        client.started_at <= exec.claimed_at as is_registered,
        case
          when client.started_at <= exec.claimed_at then client.dead_after
          else least(client.dead_after, @unregistered_for::cstring::text::interval)
        end as dead_after
    ) as claimant,
    lateral (
      values (exec.claimed_at), (case when is_registered then client.heartbeat_at end),
        (case when is_registered then pg_postmaster_start_time() end)
    ) as seen (seen_at)
    where seen_at between now() - claimant.dead_after and clock_timestamp() + claimant.dead_after
  ))
from /* schema */ riverpy_exec as exec
left join /* schema */ riverpy_client as client on client.client_id = exec.claimed_by
where exec.key = @key::cstring::text;


-- name: exec_check_transaction
-- The id of the transaction, or null if it has written nothing. It raises in a failed transaction, whose commit would
-- store nothing and raise no error.
select xid8out(pg_current_xact_id_if_assigned());


-- name: exec_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_exec') is not null;


-- name: exec_expired
-- Up to @limit keys after the given key whose retention is over, oldest first. The time crosses as text in ISO
-- format, whatever the session's format is.
select key, to_jsonb(kept_until) #>> '{}'
from /* schema */ riverpy_exec
where kept_until < now()
  and kept_until >= coalesce(@after_time::text::timestamptz, '-infinity')
  and (kept_until, key) > (coalesce(@after_time::text::timestamptz, '-infinity'), coalesce(@after_key::text, ''))
order by kept_until, key
limit @limit::bigint;


-- name: exec_delete_expired
-- Delete those given keys whose retention is over. Leaders of two domains may run it at once: each skips rows
-- that the other has locked. The time is not compared as a plain column, or the index would be read for all expired
-- keys.
with over as materialized (
  select key
  from /* schema */ riverpy_exec
  where key = any(@keys::text[]) and kept_until + interval '0' < now()
  order by key
  for update skip locked
)
delete from /* schema */ riverpy_exec
where key = any(array(select key from over))
returning key;
