-- Statements on our table of what is done once.
--
-- Only the server's clock is compared. An epoch is not below that clock in microseconds, so that the epochs of a key
-- rise even where its row was deleted meanwhile.
--
-- A caller's connection may have codecs of its own for any type but pseudo-types and text[]: values cross as cstring,
-- times in hexadecimal digits of the wire format.


-- name: exec_insert
-- Note an effect of this transaction; returns the transaction's id. It waits for another transaction that has noted it;
-- no row: that one, or an earlier one, did it.
insert into /* schema */ riverpy_exec (key, epoch, claimed_by, completed_at, kept_until)
values (
  @key::cstring::text, (extract(epoch from clock_timestamp()) * 1000000)::bigint, @claimed_by::cstring::text, now(),
  now() + @kept::cstring::text::interval
)
on conflict (key) do nothing
returning xid8out(pg_current_xact_id());


-- name: exec_claim
-- Claim what is to be done outside of the database, for a time or, null, for ever. What is claimed is taken over if the
-- claim has expired; no row: it is done, or claimed.
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
-- Say that what was claimed is done. No row: another has taken the claim over.
update /* schema */ riverpy_exec
set completed_at = now(), kept_until = now() + @kept::cstring::text::interval
where key = @key::cstring::text and epoch = @epoch::cstring::text::bigint
returning textout(key);


-- name: exec_release
-- Let anybody claim at once what was not done.
update /* schema */ riverpy_exec
set expires_at = '-infinity'
where key = @key::cstring::text and epoch = @epoch::cstring::text::bigint;


-- name: exec_get
-- How it stands with a key.
select
  textout(claimed_by), textout(encode(timestamptz_send(/* finite */ (claimed_at)), 'hex')),
  boolout(expires_at is not null), boolout(completed_at is not null)
from /* schema */ riverpy_exec
where key = @key::cstring::text;


-- name: exec_check_transaction
-- The id of the transaction; null: it has written nothing. An error in a transaction that has failed, of which a commit
-- stores nothing and is none.
select xid8out(pg_current_xact_id_if_assigned());


-- name: exec_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_exec') is not null;


-- name: exec_expired
-- Up to @limit keys whose time is over, the oldest first, from behind the given one on. The time crosses as text, in
-- ISO's form whatever the session's.
select key, to_jsonb(kept_until) #>> '{}'
from /* schema */ riverpy_exec
where kept_until < now()
  and kept_until >= coalesce(@after_time::text::timestamptz, '-infinity')
  and (kept_until, key) > (coalesce(@after_time::text::timestamptz, '-infinity'), coalesce(@after_key::text, ''))
order by kept_until, key
limit @limit::bigint;


-- name: exec_delete_expired
-- Delete those of the given rows whose time is over. Two leaders of two domains may do it at once: each skips what the
-- other has locked. The time is no plain column here, or its index would be read for all that is over.
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
