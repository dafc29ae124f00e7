"""Waiting for the end of jobs, and the connection that listens for a client that does not work."""
