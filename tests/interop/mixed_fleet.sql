-- The records of the test of a mixed fleet: every change of the leader's row, the effects of each term's maintenance on
-- two jobs that the election inserts (a due one and one that finished long ago), each completion, and the slot of each
-- periodic job.

create table leader_history (
  number bigint generated always as identity primary key,
  act text not null,
  leader_id text not null,
  elected_at timestamptz not null,
  expires_at timestamptz not null,
  at timestamptz not null,
  application text not null
);

create table maintenance_history (
  act text not null,
  leader_id text not null,
  elected_at timestamptz not null,
  application text not null
);

create function record_leader() returns trigger language plpgsql as $$
declare
  subject river_leader := coalesce(new, old);
begin
  insert into leader_history (act, leader_id, elected_at, expires_at, at, application)
  values (
    lower(tg_op), subject.leader_id, subject.elected_at, subject.expires_at, now(), current_setting('application_name')
  );
  if tg_op = 'INSERT' or (tg_op = 'UPDATE' and old.elected_at <> new.elected_at) then
    insert into river_job (kind, queue, args, max_attempts, state, scheduled_at, finalized_at)
    values
      ('marker', 'nobody', json_build_object('leader_id', new.leader_id, 'elected_at', new.elected_at), 1,
        'scheduled', now(), null),
      ('marker', 'nobody', json_build_object('leader_id', new.leader_id, 'elected_at', new.elected_at), 1,
        'completed', now(), now() - interval '30 days');
  end if;
  return null;
end
$$;

create function record_maintenance() returns trigger language plpgsql as $$
begin
  insert into maintenance_history (act, leader_id, elected_at, application)
  values (
    case when tg_op = 'DELETE' then 'cleaned' else 'scheduled' end,
    old.args ->> 'leader_id', (old.args ->> 'elected_at')::timestamptz, current_setting('application_name')
  );
  return null;
end
$$;

create trigger record_leader after insert or update or delete on river_leader
for each row execute function record_leader();

create trigger record_maintenance after update of state or delete on river_job
for each row when (old.kind = 'marker') execute function record_maintenance();

create table completion_history (job_id bigint not null, worker text not null);

create table slot_history (slot timestamptz not null, language text not null);

create function record_completion() returns trigger language plpgsql as $$
begin
  insert into completion_history (job_id, worker) values (new.id, new.attempted_by[cardinality(new.attempted_by)]);
  return null;
end
$$;

create function record_slot() returns trigger language plpgsql as $$
begin
  insert into slot_history (slot, language) values (date_trunc('second', new.scheduled_at), new.args ->> 'by');
  return null;
end
$$;

create trigger record_completion after update of state on river_job
for each row when (new.state = 'completed' and old.state <> 'completed' and new.kind <> 'marker')
execute function record_completion();

create trigger record_slot after insert on river_job
for each row when (new.kind = 'noop') execute function record_slot();
