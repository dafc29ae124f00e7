-- The table of version 1 has no lines, so the record of any other line would be lost.
DO $$
BEGIN
    IF to_regclass($name$/* schema */ river_migration$name$) IS NULL THEN
        RETURN;
    END IF;

    IF EXISTS (SELECT FROM /* schema */ river_migration WHERE line <> 'main') THEN
        RAISE EXCEPTION 'river_migration has rows of other lines than main'
            USING HINT = 'Migrate the other lines down to nothing first.';
    END IF;

    ALTER TABLE /* schema */ river_migration RENAME TO river_migration_old;

    CREATE TABLE /* schema */ river_migration (
        id bigserial PRIMARY KEY,
        created_at timestamptz NOT NULL DEFAULT now(),
        version bigint NOT NULL,
        CONSTRAINT version CHECK (version >= 1)
    );

    CREATE UNIQUE INDEX river_migration_version_idx ON /* schema */ river_migration (version);

    INSERT INTO /* schema */ river_migration (created_at, version)
    SELECT created_at, version FROM /* schema */ river_migration_old ORDER BY version;

    DROP TABLE /* schema */ river_migration_old;
END
$$;

DROP TABLE /* schema */ river_client_queue;
DROP TABLE /* schema */ river_client;

-- Drops river_job_kind_unique_key_idx with it.
ALTER TABLE /* schema */ river_job DROP COLUMN unique_key;
