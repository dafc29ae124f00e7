"""What the leader does for all clients of a schema."""
