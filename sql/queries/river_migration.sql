-- The record of applied migrations, and what a migrator reads before and during its work.


-- name: migration_place
-- The schema that has River's tables or would get them, and its state. Without a configured schema the search path
-- decides: the schema where it finds River's tables, or otherwise the one where it would create new ones.
WITH named AS (
    SELECT coalesce(
        @schema::text,
        (
            SELECT n.nspname::text
            FROM pg_catalog.pg_class AS c
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
            WHERE c.oid = coalesce(to_regclass('river_migration'), to_regclass('river_job'))
        ),
        current_schema()::text
    ) AS name
),
-- The oid lets the server find relations by the index on names and schemas, however many schemas have River's tables.
place AS (
    SELECT named.name, n.oid
    FROM named
    LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = named.name
),
columns AS (
    SELECT c.relname, a.attname
    FROM place
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = place.oid
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
    WHERE c.relname IN ('river_migration', 'river_job') AND a.attnum > 0 AND NOT a.attisdropped
),
-- Tables in which row-level security may hide rows from this role: no policy that applies to it allows every row.
-- riverpy does not use the tables of River that are left out.
secured AS (
    SELECT
        c.relname::text AS relname,
        EXISTS (SELECT FROM pg_catalog.pg_policy AS p WHERE p.polrelid = c.oid) AS has_policy
    FROM place
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = place.oid
    WHERE c.relrowsecurity
        AND c.relkind IN ('r', 'p')
        AND c.relname ~ '^river(py)?_'
        AND c.relname NOT IN ('river_client', 'river_client_queue')
        AND row_security_active(c.oid)
        AND NOT EXISTS (
            SELECT
            FROM pg_catalog.pg_policy AS p
            WHERE p.polrelid = c.oid
                AND p.polpermissive
                AND p.polcmd = '*'
                AND pg_get_expr(p.polqual, p.polrelid) = 'true'
                AND (0 = ANY (p.polroles) OR EXISTS (
                    SELECT FROM unnest(p.polroles) AS member WHERE pg_has_role(member, 'USAGE')
                ))
        )
)
SELECT
    place.name AS schema,
    place.oid IS NOT NULL AS schema_exists,
    EXISTS (SELECT FROM columns WHERE relname = 'river_migration') AS has_record,
    EXISTS (SELECT FROM columns WHERE relname = 'river_migration' AND attname = 'line') AS has_lines,
    EXISTS (SELECT FROM columns WHERE relname = 'river_job') AS has_jobs,
    -- Left by a CREATE INDEX CONCURRENTLY that failed. REINDEX names its own `…_ccnew` and `…_ccold`.
    ARRAY(
        SELECT c.relname::text
        FROM pg_catalog.pg_class AS c
        JOIN pg_catalog.pg_index AS i ON i.indexrelid = c.oid
        WHERE c.relnamespace = place.oid
            AND NOT i.indisvalid
            AND c.relname ~ '^river_'
            AND c.relname !~ '_cc(new|old)[0-9]*$'
        ORDER BY c.relname
    ) AS invalid_indexes,
    current_user::text AS role,
    ARRAY(SELECT relname FROM secured WHERE NOT has_policy ORDER BY relname) AS hidden_tables,
    ARRAY(SELECT relname FROM secured WHERE has_policy ORDER BY relname) AS filtered_tables
FROM place;

-- name: migration_list
-- Times cross as microseconds since 1970, because the connection may have its own codec for timestamps.
SELECT line, version, (extract(epoch FROM /* finite */ (created_at)) * 1000000)::bigint AS created_at
FROM /* schema */ river_migration
ORDER BY line, version;

-- name: migration_list_without_line
-- The same for the table before version 5 of line main.
SELECT 'main' AS line, version, (extract(epoch FROM /* finite */ (created_at)) * 1000000)::bigint AS created_at
FROM /* schema */ river_migration
ORDER BY version;

-- name: migration_insert
INSERT INTO /* schema */ river_migration (line, version) VALUES (@line, @version);

-- name: migration_insert_without_line
INSERT INTO /* schema */ river_migration (version) VALUES (@version);

-- name: migration_delete
DELETE FROM /* schema */ river_migration WHERE line = @line AND version = @version;

-- name: migration_delete_without_line
DELETE FROM /* schema */ river_migration WHERE version = @version;

-- name: migration_limits
-- Set timeouts in milliseconds for this transaction. Between two statements a migrator is idle for one round trip.
-- One that is idle for longer is gone and must not keep its locks. A `transaction_timeout` of the role (PostgreSQL
-- 17) would end a step half-way.
SELECT set_config(given.name, given.value, true)
FROM (
    VALUES
        ('application_name', 'riverpy migrate'),
        ('lock_timeout', @lock_timeout::text),
        ('statement_timeout', @statement_timeout::text),
        ('idle_in_transaction_session_timeout', @idle_timeout::text),
        ('transaction_timeout', '0')
) AS given (name, value)
JOIN pg_settings USING (name);

-- name: migration_lock
-- Lock out other migrators of the schema, for all lines: version 5 of line main rebuilds the table that all lines
-- share.
SELECT pg_advisory_xact_lock(hashtextextended('riverpy migrate ' || @schema::text, 0));

-- name: schema_create
-- For Django's migrations. `@name` is the quoted name of the schema.
CREATE SCHEMA IF NOT EXISTS @name;

-- name: migration_run
-- One statement for another migration tool. It changes nothing if the version is applied already (in the other
-- direction: undone already). `@sql` is the text of the migration. EXECUTE runs all statements of a text, so that also
-- drivers that send only single statements can run it. Old versions of the table have no column `line`.
DO $riverpy$
DECLARE
    is_applied boolean := false;
BEGIN
    PERFORM set_config('lock_timeout', '4s', true);
    IF to_regclass($name$/* schema */ river_migration$name$) IS NOT NULL THEN
        is_applied := EXISTS (
            SELECT
            FROM /* schema */ river_migration AS migration
            WHERE migration.version = @version
                AND coalesce(to_jsonb(migration) ->> 'line', 'main') = @line
        );
    END IF;
    IF is_applied = @applied THEN
        EXECUTE @sql;
    END IF;
END
$riverpy$;
