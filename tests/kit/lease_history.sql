-- The acts of holders of leases, in tables of their own. Grants and writes of a lease have positions in the order of their
-- commits: a transaction that takes a position keeps the row of the counter locked until its end.

-- name: create
create schema lease_history;
create table lease_history.counter (
  lease text not null,
  is_fenced boolean not null,
  place bigint not null,
  primary key (lease, is_fenced)
);
create table lease_history.grant (
  lease text not null,
  place bigint not null,
  epoch bigint not null,
  holder text not null,
  granted_at timestamptz not null,
  free_since timestamptz
);
create table lease_history.release (
  lease text not null,
  epoch bigint not null,
  at timestamptz not null
);
create table lease_history.write (
  lease text not null,
  is_fenced boolean not null,
  place bigint not null,
  epoch bigint not null,
  process text not null,
  number bigint not null
);
create function lease_history.next_place(of_lease text, fenced boolean) returns bigint
language sql as $$
  insert into lease_history.counter as counter values (of_lease, fenced, 1)
  on conflict (lease, is_fenced) do update set place = counter.place + 1
  returning place
$$;
create function lease_history.note() returns trigger
language plpgsql as $$
begin
  if tg_op = 'UPDATE' and new.acquired_at = old.acquired_at then
    if new.expires_at = '-infinity' then
      insert into lease_history.release values (new.name, new.epoch, clock_timestamp());
    end if;
    return null;
  end if;
  insert into lease_history.grant
  values (
    new.name, lease_history.next_place(new.name, true), new.epoch, new.holder, clock_timestamp(),
    case when tg_op = 'UPDATE' then old.expires_at end
  );
  return null;
end
$$;
create trigger note after insert or update on riverpy_lease
for each row execute function lease_history.note();

-- name: break_epoch
create function lease_history.keep_epoch() returns trigger
language plpgsql as $$
begin
  new.epoch := old.epoch;
  return new;
end
$$;
create trigger keep_epoch before update on riverpy_lease
for each row execute function lease_history.keep_epoch();

-- name: write
insert into lease_history.write (lease, is_fenced, place, epoch, process, number)
values ($1, $2, lease_history.next_place($1, $2), $3, $4, $5);

-- name: grants
select lease, place, epoch, holder, granted_at, nullif(free_since, '-infinity') as free_since
from lease_history.grant
order by lease, place;

-- name: releases
select lease, epoch, at from lease_history.release order by at;

-- name: writes
select lease, is_fenced, place, epoch, process, number from lease_history.write order by lease, is_fenced, place;

-- name: holder
select holder from riverpy_lease where expires_at > now() order by random() limit 1;

-- name: held
select name, epoch from riverpy_lease where expires_at > now() order by name;

-- name: grant_count
select count(*) from lease_history.grant;
