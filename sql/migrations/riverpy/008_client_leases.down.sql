ALTER TABLE /* schema */ riverpy_client DROP COLUMN leases;
