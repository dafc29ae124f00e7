ALTER TABLE /* schema */ riverpy_client DROP COLUMN slots, DROP COLUMN stuck;
