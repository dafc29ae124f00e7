"""The maintenance services that a leader runs for all clients of a schema."""
