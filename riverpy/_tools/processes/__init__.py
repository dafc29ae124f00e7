"""The worker processes of `riverpy worker --processes`, and their supervisor."""
