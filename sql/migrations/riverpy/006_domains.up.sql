-- Which domain keeps which queue, the others being `default`'s; and of each client, whose it is. `last_seen_at` is when
-- a client of the domain that claims the queue gave its last sign of life.
--
-- The id of a periodic job of a domain is followed by `@` and the domain's name.
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
