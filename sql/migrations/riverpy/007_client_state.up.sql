-- Whether a client is working or stopping; the process in which it runs, so that other processes of the machine can
-- tell when it has ended; and the rows that it has set aside, because each fails alone. Null: not known, or none.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN state text, ADD COLUMN process text, ADD COLUMN set_aside jsonb;
