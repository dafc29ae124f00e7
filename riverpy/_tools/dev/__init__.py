"""What `riverpy dev` runs."""
