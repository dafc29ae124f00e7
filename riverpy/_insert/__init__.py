"""Inserting jobs: check and encode them, run hooks and middleware, send them to the database."""
