-- Fails while two jobs of one kind share a unique key: delete all but one of them first.
CREATE UNIQUE INDEX river_job_kind_unique_key_idx
    ON /* schema */ river_job (kind, unique_key) WHERE unique_key IS NOT NULL;

-- Drops river_job_unique_idx with it.
ALTER TABLE /* schema */ river_job DROP COLUMN unique_states;
DROP FUNCTION /* schema */ river_job_state_in_bitmask(bit, /* schema */ river_job_state);
