-- The domain that owns each queue (queues without a row belong to `default`), and the domain of each client.
-- `last_seen_at` is the last heartbeat of a client of the domain that owns the queue.
--
-- The id of a domain's periodic job ends with `@` and the domain's name.
CREATE TABLE /* schema */ riverpy_queue_owner (
    queue text PRIMARY KEY,
    domain text NOT NULL,
    claimed_by text NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT queue_length CHECK (char_length(queue) > 0 AND char_length(queue) < 128),
    CONSTRAINT domain_length CHECK (char_length(domain) > 0 AND char_length(domain) < 128)
) WITH (fillfactor = 50);
ALTER TABLE /* schema */ riverpy_client
    ADD COLUMN domain text NOT NULL DEFAULT 'default',
    ADD COLUMN settings text;
ALTER TABLE /* schema */ riverpy_periodic
    DROP CONSTRAINT id_length,
    ADD CONSTRAINT id_length CHECK (char_length(id) > 1 AND char_length(id) < 256);
