DELETE FROM /* schema */ riverpy_periodic WHERE char_length(id) > 127;
ALTER TABLE /* schema */ riverpy_periodic
    DROP CONSTRAINT id_length,
    ADD CONSTRAINT id_length CHECK (char_length(id) > 1 AND char_length(id) < 128);
ALTER TABLE /* schema */ riverpy_client DROP COLUMN domain, DROP COLUMN settings;
DROP TABLE /* schema */ riverpy_queue_owner;
