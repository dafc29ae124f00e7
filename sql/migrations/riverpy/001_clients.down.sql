DROP TABLE /* schema */ riverpy_client;
