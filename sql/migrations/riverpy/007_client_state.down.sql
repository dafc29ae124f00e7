ALTER TABLE /* schema */ riverpy_client DROP COLUMN state, DROP COLUMN process, DROP COLUMN set_aside;
