"""Leases of user code: where they are, and who in this process keeps them."""
