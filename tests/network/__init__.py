"""Tests of riverpy on a broken network, and behind a pooler."""
