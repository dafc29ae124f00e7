"""A private PostgreSQL for development, demos and tests."""
