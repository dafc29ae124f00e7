-- Notifications. A channel is named `<schema>.<topic>`, after the schema in which the table of the topic was found.
--
-- When the server's queue of notifications is full, every commit that notifies fails. So our statements stop
-- notifying when it is nine tenths full, and polling finds what they change. Reading how full the queue is also makes
-- the server drop what no session needs any more.


-- name: notification_schemas
-- The schemas in the names of channels: that of River's jobs, that of our leases, and the first one of the search
-- path, which River in Go uses.
select
  /* schema of river_job */ current_schema()::text,
  /* schema of riverpy_lease */ current_schema()::text,
  current_schema()::text;


-- name: notify
-- No row: nothing was sent, because the queue is too full.
select pg_notify(@channel::text, @payload::text)
where (select pg_notification_queue_usage() < 0.9);


-- name: insert_notify
-- Notify the clients of these queues that jobs were inserted.
select pg_notify(
  -- include: job_parts.insert_message
)
from unnest(@notify::text[]) as given (queue)
where (select pg_notification_queue_usage() < 0.9);
