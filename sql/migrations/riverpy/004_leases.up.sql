-- The holder of each lease, and its expiry by the server's clock: the leaders of domains, the lease of the schema,
-- and leases of users. A row stays after its lease has ended, because the epoch, which rises with each holder,
-- identifies late writes of an earlier holder.
--
-- Logged, so that no epoch is used twice. The epoch is part of a key: a transaction with a key share lock on the row
-- does not block renewals, but blocks a takeover. A renewal changes no indexed column and finds room on the same
-- page.
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
