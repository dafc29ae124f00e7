"""Tests of the client: what it refuses, what its verbs do, what they notify."""
