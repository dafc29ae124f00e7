DROP TABLE /* schema */ riverpy_periodic;
