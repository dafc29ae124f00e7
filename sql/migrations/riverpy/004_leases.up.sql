-- Who holds which lease, until when by the server's clock: the lead of a domain, what the schema has one of, and the
-- leases of users. A row stays when its lease is over: its epoch, which rises with each holder, tells the writes of an
-- older one.
--
-- Logged, so that an epoch is never given twice. The epoch is in a key: a transaction that holds a key share lock on the
-- row lets renewals pass and keeps a takeover waiting. A renewal changes no indexed column, and finds room on its page.
CREATE TABLE /* schema */ riverpy_lease (
    name text PRIMARY KEY,
    epoch bigint NOT NULL,
    holder text NOT NULL,
    ttl interval NOT NULL,
    acquired_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    UNIQUE (name, epoch),
    CONSTRAINT name_length CHECK (char_length(name) > 0 AND char_length(name) < 128),
    CONSTRAINT holder_length CHECK (char_length(holder) > 0 AND char_length(holder) < 128),
    CONSTRAINT ttl_in_range CHECK (ttl > interval '0' AND ttl <= interval '1 day')
) WITH (fillfactor = 50);
