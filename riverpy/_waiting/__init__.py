"""Waiting for the end of jobs, and the connection on which a client listens while it works no
jobs."""
