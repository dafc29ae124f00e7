"""Tests of singletons, leases of a client, and effects for a key."""
