-- Notifications. A channel is `<schema>.<topic>`.


-- name: schema_of_channels
-- The schema that channels are named after: the given one, or the first of the search path.
select coalesce(@schema::text, current_schema()::text);


-- name: notify
select pg_notify(@channel::text, @payload::text);
