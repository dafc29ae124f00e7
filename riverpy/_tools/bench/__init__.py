"""What `riverpy bench` measures."""
