-- What is done once: a key for each effect, claimed before it and completed after it, or with it in one transaction.
--
-- Logged: what was done stays done after a crash of the server. A claim that expires may be taken by another, with a
-- higher epoch; one without an expiry is never. Rows go when their time is over, `kept_until`; null: never.
CREATE TABLE /* schema */ riverpy_exec (
    key text PRIMARY KEY,
    epoch bigint NOT NULL,
    claimed_by text NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    completed_at timestamptz,
    kept_until timestamptz,
    CONSTRAINT key_length CHECK (char_length(key) > 0 AND char_length(key) <= 255)
);
CREATE INDEX riverpy_exec_kept_until_index ON /* schema */ riverpy_exec (kept_until) WHERE kept_until IS NOT NULL;
