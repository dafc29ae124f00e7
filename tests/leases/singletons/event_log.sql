-- An event log, what two projections and one automation make of it, and what tells whether each event was applied once
-- and in order. The tables are those of the search path.


-- name: create
-- Events have one writer, so their ids become visible in order. `applied` and `letter` have no key that would refuse a
-- second one: the checker is to see it.
create table event_log (
  id bigint generated always as identity primary key,
  stream text not null,
  amount int not null,
  appended_at timestamptz not null default clock_timestamp()
);
create table projection (
  name text primary key,
  id bigint not null default 0,
  epoch bigint not null default 0
);
create table applied (
  position bigint generated always as identity,
  projection text not null,
  event bigint not null,
  epoch bigint not null
);
create table stream_total (projection text, stream text, total bigint not null, primary key (projection, stream));
create table letter (event bigint not null, epoch bigint not null);
create table todo (event bigint primary key, done_at timestamptz);


-- name: append
insert into event_log (stream, amount)
select 'stream ' || (i % 7), i
from generate_series(1, $1::int) as i;


-- name: register
insert into projection (name) values ($1) on conflict do nothing;


-- name: next_events
select event.id, event.stream, event.amount
from event_log as event, projection
where projection.name = $1 and event.id > projection.id
order by event.id
limit $2;


-- name: apply
-- All that a projection makes of some events, and its checkpoint, in one statement: who was frozen before it sends it
-- whole when it goes on.
with event as (
  select * from unnest($2::bigint[], $3::text[], $4::int[]) with ordinality as given (id, stream, amount, nth)
), noted as (
  insert into applied (projection, event, epoch)
  select $1, id, $5 from event order by nth
), added as (
  insert into stream_total as now (projection, stream, total)
  select $1, stream, sum(amount) from event group by stream
  on conflict (projection, stream) do update set total = now.total + excluded.total
), listed as (
  insert into todo (event)
  select id from event where $1 = 'history'
  on conflict do nothing
)
update projection set id = $2[cardinality($2)], epoch = $5 where name = $1;


-- name: open_todos
select event from todo where done_at is null order by event limit $1;


-- name: write_letter
insert into letter (event, epoch) values ($1, $2);


-- name: todo_done
update todo set done_at = now() where event = $1;


-- name: lag
-- How far each projection is behind: events, and seconds since the oldest of them was appended.
select
  projection.name, count(event.id) as events,
  coalesce(extract(epoch from clock_timestamp() - min(event.appended_at)), 0)::float8 as seconds
from projection
left join event_log as event on event.id > projection.id
group by projection.name
order by projection.name;


-- name: counts
select
  (select count(*) from event_log) as events,
  (select count(*) from applied) as applied,
  (select count(*) from todo where done_at is not null) as done;


-- name: misapplied
-- Events that a projection applied twice, out of order or never.
with expected as (
  select projection.name, event.id, row_number() over (partition by projection.name order by event.id) as nth
  from event_log as event, projection
), found as (
  select projection as name, event as id, row_number() over (partition by projection order by position) as nth
  from applied
)
select name, nth, expected.id as expected, found.id as found
from expected
full join found using (name, nth)
where expected.id is distinct from found.id
order by name, nth
limit 10;


-- name: wrong_totals
select projection, stream, total, expected
from stream_total
join (select stream, sum(amount) as expected from event_log group by stream) as log using (stream)
where total <> expected
limit 10;


-- name: late_writes
-- Writes of an older term after one of a newer.
select projection, event, epoch
from (
  select *, max(epoch) over (partition by projection order by position) as newest
  from applied
) as seen
where epoch < newest
limit 10;


-- name: wrong_letters
-- Events without their letter, or with more than one.
select event.id, count(letter.event) as letters
from event_log as event
left join letter on letter.event = event.id
group by event.id
having count(letter.event) <> 1
limit 10;


-- name: claims_left
select key from riverpy_exec where completed_at is null;


-- name: holder
select holder, epoch from riverpy_lease where name = $1 and expires_at >= now();
