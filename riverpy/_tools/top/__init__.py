"""What `riverpy top` reads and draws."""
