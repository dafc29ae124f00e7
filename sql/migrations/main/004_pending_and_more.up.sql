-- No statement of this version may use the value: PostgreSQL allows that only after the commit.
ALTER TYPE /* schema */ river_job_state ADD VALUE IF NOT EXISTS 'pending' AFTER 'discarded';

-- From this version on clients notify.
DROP TRIGGER river_notify ON /* schema */ river_job;
DROP FUNCTION /* schema */ river_job_notify();

UPDATE /* schema */ river_job SET args = '{}' WHERE args IS NULL;

-- One ALTER TABLE, so that the checks share one scan of the table.
ALTER TABLE /* schema */ river_job
    ALTER COLUMN args SET NOT NULL,
    DROP CONSTRAINT finalized_or_finalized_at_null,
    ADD CONSTRAINT finalized_or_finalized_at_null CHECK (
        (finalized_at IS NULL AND state NOT IN ('cancelled', 'completed', 'discarded'))
        OR (finalized_at IS NOT NULL AND state IN ('cancelled', 'completed', 'discarded'))
    );

CREATE TABLE /* schema */ river_queue (
    name text PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now(),
    metadata jsonb NOT NULL DEFAULT '{}',
    paused_at timestamptz,
    updated_at timestamptz NOT NULL
);

-- At most one leader. Rows with other names are useless: so far the name was free text.
DELETE FROM /* schema */ river_leader WHERE name <> 'default';
ALTER TABLE /* schema */ river_leader
    ALTER COLUMN name SET DEFAULT 'default',
    DROP CONSTRAINT name_length,
    ADD CONSTRAINT name_length CHECK (name = 'default');
