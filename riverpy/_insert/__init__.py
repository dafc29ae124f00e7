"""Inserts of jobs: validates and encodes jobs, runs hooks and middleware, and sends the jobs to the
database."""
