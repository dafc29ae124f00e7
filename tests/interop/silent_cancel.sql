-- Sets a cancel mark on a job with certain metadata when it is claimed: a cancel without a notification.
CREATE FUNCTION mark_silently() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.metadata := (NEW.metadata - 'silent_cancel') || '{"cancel_attempted_at": "2026-11-27T21:24:34.050881469Z"}';
  RETURN NEW;
END
$$;
CREATE TRIGGER mark_silently BEFORE UPDATE ON river_job FOR EACH ROW
WHEN (OLD.state <> 'running' AND NEW.state = 'running' AND NEW.metadata ? 'silent_cancel')
EXECUTE FUNCTION mark_silently();
