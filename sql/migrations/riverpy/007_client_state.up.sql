-- Whether a client works or is stopping, and the process in which it runs, so that another process of the same machine
-- knows when that has ended. Null: not known.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN state text, ADD COLUMN process text;
