"""Tests of user code that misbehaves."""
