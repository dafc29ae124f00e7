"""Leases: a lease gives one process at a time the right to act under a name."""
