-- The keys of run_once and its variants: each is claimed before its effect and completed after it, or both in one
-- transaction.
--
-- Logged, so that completed keys stay completed after a crash of the server. Another caller may claim a key whose
-- claim has expired, with a higher epoch. A claim without an expiry never expires. Rows are deleted after
-- `kept_until`; null: never.
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
