-- The history of a fleet: the acts of its workers, in tables of their own. `at` is a time of the machine's clock. The
-- server has the same clock unless it is stepped.

-- name: create
create schema history;
create table history.act (
  process text not null,
  number int not null,
  what text not null,
  leader_id text,
  elected_at timestamptz,
  stalled_since timestamptz,
  job_id bigint,
  attempt int,
  at timestamptz not null,
  written_at timestamptz not null default clock_timestamp(),
  primary key (process, number)
);
create table history.term_write (
  leader_id text not null,
  elected_at timestamptz not null,
  number int not null,
  at timestamptz not null
);

-- name: act
-- A process sends an act again when the answer was lost.
insert into history.act (process, number, what, leader_id, elected_at, stalled_since, job_id, attempt, at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
on conflict do nothing;

-- name: term_write
insert into history.term_write (leader_id, elected_at, number, at) values ($1, $2, $3, $4);

-- name: acts
select process, what, leader_id, elected_at, stalled_since, job_id, attempt, at
from history.act
order by at, process, number;

-- name: term_writes
-- The server's clock may be wrong by ten minutes. `at` is the true time, shortly before the commit.
select
  leader_id, elected_at, number,
  committed_at - interval '10 minutes' * round(extract(epoch from committed_at - at) / 600) as committed_at
from (select *, pg_xact_commit_timestamp(xmin) as committed_at from history.term_write) as written
order by committed_at;

-- name: slots
select
  metadata ->> 'river:periodic_job_id' as periodic_id,
  scheduled_at,
  created_at
from river_job
where metadata ? 'river:periodic_job_id'
order by scheduled_at, id;

-- name: jobs
select
  id,
  state::text as state,
  attempt::int as attempt,
  coalesce((metadata ->> 'river:rescue_count')::int, 0) as rescues,
  coalesce(array_length(errors, 1), 0) as errors,
  (select count(*) from unnest(errors) as e (error) where error ->> 'error' like '%could not be stored') as unstorable
from river_job
where not metadata ? 'river:periodic_job_id'
order by id;

-- name: unfinished
select count(*)
from river_job
where not metadata ? 'river:periodic_job_id' and state not in ('completed', 'discarded', 'cancelled');

-- name: policies_since
select array_agg(distinct metadata ->> 'river:periodic_job_id')
from river_job
where metadata ? 'river:periodic_job_id' and created_at > $1;

-- name: alive_since
-- The workers of the fleet whose process has sent a heartbeat.
select count(distinct split_part(client_id, ':', 1)) from riverpy_client where heartbeat_at > $1;

-- name: leader
select leader_id from river_leader where name = 'default' and expires_at >= now();

-- name: term_count
select count(distinct (leader_id, elected_at)) from history.act where what = 'begin';
