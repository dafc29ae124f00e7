DROP TABLE /* schema */ riverpy_job_count;
