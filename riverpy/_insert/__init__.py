"""Inserting jobs: from args to committed rows and their notifications."""
