-- Parts of statements that read a limited number of jobs.


-- name: candidates
-- The jobs among which a list searches: at most @candidates of each state, kind or queue. One of the sources is chosen.
-- when from_ids: select given.id from unnest(@ids::bigint[]) as given (id)
-- when from_newest: select id from /* schema */ river_job order by id desc limit @candidates::bigint
-- when from_kinds, from_ended, from_waiting, from_queues: select found.id from
-- when from_kinds: unnest(@kinds::text[]) as given (kind)
-- when from_ended, from_waiting, from_queues: unnest(@states::text[]) as given (state)
-- when from_queues: cross join unnest(@queues::text[]) as named (queue)
-- when from_kinds, from_ended, from_waiting, from_queues: cross join lateral (
-- when from_kinds, from_ended, from_waiting, from_queues: select job.id from /* schema */ river_job as job
-- when from_kinds: where job.kind = given.kind
-- when from_ended, from_waiting, from_queues: where job.state = given.state::/* schema */ river_job_state
-- when from_queues: and job.queue = named.queue
-- when from_ended: and job.finalized_at is not null order by job.finalized_at desc
-- when from_waiting: order by job.queue, job.priority, job.scheduled_at, job.id
-- when from_queues: order by job.priority, job.scheduled_at, job.id
-- when from_kinds, from_ended, from_waiting, from_queues: limit @candidates::bigint ) as found


-- name: first_waiting_kinds
-- The kinds of the first @limit available jobs of the queue `given.queue`, in the order of claims.
select job.kind
from /* schema */ river_job as job
where job.state = 'available' and job.queue = given.queue
order by job.priority, job.scheduled_at, job.id
limit @limit::bigint
