-- What is known of each periodic job, by its id: which slot comes next, whoever leads. Times are by the server's clock.
--
-- Logged: a slot that was inserted stays so after a crash of the server. A row of a job that no client has any more goes
-- after 30 days. No index but the key: there are few rows, and a run finds room on its page.
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
