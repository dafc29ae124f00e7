-- What a client reports about leases with each heartbeat: those that it would acquire if they were free, and how far it
-- is behind with those that it holds. Null: not known.
ALTER TABLE /* schema */ riverpy_client ADD COLUMN leases jsonb;
