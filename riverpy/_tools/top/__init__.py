"""What `riverpy top` reads and shows."""
