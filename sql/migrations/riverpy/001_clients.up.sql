-- The clients and their last heartbeats. Times are the server's.
--
-- Logged, so that the rows of clients that died with the server are kept after its crash. Each client is judged by
-- its own dead_after. There is no index but the key: a heartbeat changes no indexed column and finds room on the same
-- page.
CREATE TABLE /* schema */ riverpy_client (
    client_id text PRIMARY KEY,
    queues text[] NOT NULL,
    kinds text[] NOT NULL,
    candidate boolean NOT NULL,
    poll_only boolean NOT NULL,
    version text NOT NULL,
    dead_after interval NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT client_id_length CHECK (char_length(client_id) > 0 AND char_length(client_id) < 128),
    CONSTRAINT dead_after_in_range CHECK (dead_after > interval '0' AND dead_after <= interval '400000 days')
) WITH (fillfactor = 50);
