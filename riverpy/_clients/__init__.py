"""Clients of one database: their ids, their heartbeats, and which of them are dead."""
