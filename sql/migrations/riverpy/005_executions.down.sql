DROP TABLE /* schema */ riverpy_exec;
