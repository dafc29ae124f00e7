-- Whether a client works or is stopping, and the process in which it runs, so that another process of the same machine
-- knows when that has ended. Then the rows that it has set aside, because each fails alone. Null: not known, or none.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN state text, ADD COLUMN process text, ADD COLUMN set_aside jsonb;
