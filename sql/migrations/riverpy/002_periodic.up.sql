-- The next slot and the state of each periodic job, by its id. Times are the server's.
--
-- Logged, so that an inserted slot stays inserted after a crash of the server. A row that no client uses is deleted
-- after 30 days. There is no index but the key: there are few rows, and an update finds room on the same page.
CREATE TABLE /* schema */ riverpy_periodic (
    id text PRIMARY KEY,
    schedule text NOT NULL,
    next_run_at timestamptz,
    last_run_at timestamptz,
    paused_at timestamptz,
    resumed_at timestamptz,
    run_requested_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT id_length CHECK (char_length(id) > 1 AND char_length(id) < 128)
) WITH (fillfactor = 50);
