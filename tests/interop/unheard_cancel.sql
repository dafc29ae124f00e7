-- Gives a job whose metadata ask for it a cancel mark as it is claimed: a cancel that no client is told of.
CREATE FUNCTION mark_unheard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.metadata := (NEW.metadata - 'unheard') || '{"cancel_attempted_at": "2026-11-27T21:24:34.050881469Z"}';
  RETURN NEW;
END
$$;
CREATE TRIGGER mark_unheard BEFORE UPDATE ON river_job FOR EACH ROW
WHEN (OLD.state <> 'running' AND NEW.state = 'running' AND NEW.metadata ? 'unheard')
EXECUTE FUNCTION mark_unheard();
