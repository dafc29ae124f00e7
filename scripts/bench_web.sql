-- The jobs of scripts/bench web.


-- name: drop_indexes
-- Rows are inserted faster without them.
do $$
declare
  name text;
begin
  for name in
    select indexname from pg_indexes
    where schemaname = 'public' and tablename = 'river_job' and indexname <> 'river_job_pkey'
  loop
    execute format('drop index %I', name);
  end loop;
end
$$


-- name: read_indexes
select indexdef from pg_indexes
where schemaname = 'public' and tablename = 'river_job' and indexname <> 'river_job_pkey'


-- name: fill
-- Of 10,000 jobs 9,309 are completed, 390 wait in some way, and 1 runs. The newest ended just now.
insert into river_job (
  state, attempt, max_attempts, attempted_at, created_at, finalized_at, scheduled_at, priority, args, attempted_by, errors,
  kind, metadata, queue, tags
)
select
  state, case when is_new then 0 else 1 end, 25,
  case when not is_new then age + interval '20 ms' end,
  age,
  case when state in ('completed', 'cancelled', 'discarded') then age + interval '50 ms' end,
  case when state in ('scheduled', 'retryable') then now() + n % 100000 * interval '1 s' else age end,
  1 + n % 4,
  jsonb_build_object('customer', 'c' || n % 5000, 'n', n),
  case when not is_new then array['host:' || n % 20 || ':abc'] end,
  case when state in ('retryable', 'discarded') then array[jsonb_build_object('at', age, 'attempt', 1, 'error', 'boom ' || n % 7)] end,
  'kind_' || n % 40,
  jsonb_build_object('trace', 't' || n % 1000),
  'queue_' || n % 60,
  case when n % 10 = 0 then array['tag' || n % 30] else '{}' end
from (
  select
    n, state, state in ('available', 'scheduled', 'pending') as is_new,
    now() - ($2::bigint - n) * interval '6 ms' as age
  from generate_series($1::bigint, $2::bigint) as given (n)
  cross join lateral (
    select (
      case
        when n % 1000 < 930 then 'completed' when n % 1000 < 950 then 'discarded' when n % 1000 < 960 then 'cancelled'
        when n % 1000 < 980 then 'available' when n % 1000 < 990 then 'scheduled' when n % 1000 < 998 then 'retryable'
        when n % 1000 < 999 then 'pending' when n % 10000 = 9999 then 'running' else 'completed'
      end
    )::river_job_state as state
  ) as chosen
) as job
