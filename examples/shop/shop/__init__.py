"""A small shop: a web API and six kinds of jobs."""
