ALTER TABLE /* schema */ riverpy_periodic DROP COLUMN run_request;
