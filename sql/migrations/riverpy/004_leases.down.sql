DROP TABLE /* schema */ riverpy_lease;
