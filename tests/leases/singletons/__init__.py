"""Tests of what runs once: singletons of a fleet, leases of a client, effects for a key."""
