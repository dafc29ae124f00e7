-- Who or what requested a run of a periodic job, and when. It belongs to run_requested_at if it is not older. Null: not
-- known.
ALTER TABLE /* schema */ riverpy_periodic ADD COLUMN run_request jsonb;
