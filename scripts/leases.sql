-- Statements of scripts/leases.


-- name: roles
CREATE ROLE holder LOGIN IN ROLE postgres;
CREATE ROLE follower LOGIN IN ROLE postgres;
CREATE EXTENSION pg_stat_statements;


-- name: reset
SELECT pg_stat_statements_reset();


-- name: clear
TRUNCATE riverpy_lease;


-- name: statements
-- The number of statements of a role, and of those that changed leases.
SELECT
  coalesce(sum(s.calls), 0)::bigint AS calls,
  coalesce(sum(s.calls) FILTER (WHERE s.rows > 0 AND s.query ILIKE '%update%riverpy_lease%'), 0)::bigint AS renewals,
  coalesce(sum(s.total_exec_time) FILTER (WHERE s.query ILIKE '%update%riverpy_lease%'), 0) AS milliseconds,
  coalesce(sum(s.wal_bytes) FILTER (WHERE s.query ILIKE '%update%riverpy_lease%'), 0)::bigint AS wal_bytes
FROM pg_stat_statements AS s
JOIN pg_roles AS r ON r.oid = s.userid
WHERE r.rolname = $1 AND s.query NOT ILIKE 'begin%' AND s.query NOT ILIKE 'commit%';


-- name: churn
-- The flushed statistics of the table.
SELECT n_tup_upd AS updates, n_tup_hot_upd AS hot, n_dead_tup AS dead, pg_relation_size(relid) AS bytes
FROM pg_stat_user_tables
WHERE relname = 'riverpy_lease';
