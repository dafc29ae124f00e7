-- The jobs of a load and their states.

-- name: create
create schema load;
create table load.finish (job_id bigint not null, attempt int not null);
create function load.note_finish() returns trigger language plpgsql as $$
begin
  insert into load.finish values (new.id, new.attempt);
  return null;
end $$;
create trigger note_finish after update on river_job
for each row when (new.state = 'completed') execute function load.note_finish();

-- name: unfinished
select count(*) from river_job where state not in ('completed', 'cancelled');

-- name: completed_since
select count(*) from river_job where id > $1 and state = 'completed';

-- name: state
select state::text from river_job where id = $1;

-- name: newest
select coalesce(max(id), 0) from river_job;

-- name: now
select now();

-- name: many_available
select count(*) > $1 from river_job where state = 'available';

-- name: all_have_beaten
select bool_and(heartbeat_at > $1) from riverpy_client;

-- name: lease_is_renewed
select expires_at - make_interval(secs => 15) > $1 from river_leader;

-- name: ends
select
  id,
  state::text as state,
  attempt::int as attempt,
  coalesce((metadata ->> 'river:rescue_count')::int, 0) as rescues,
  coalesce(array_length(errors, 1), 0) as errors,
  coalesce(finishes, 0) as finishes
from river_job
left join (select job_id as id, count(*) as finishes from load.finish group by job_id) as finish using (id)
order by id;

-- name: clear
-- No job is available, running or due.
truncate load.finish;
delete from river_job;
