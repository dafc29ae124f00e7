"""Leases: the right of one process at a time to act under a name."""
