"""Inserts of jobs: check and encode jobs, run hooks and middleware, send jobs to the database."""
