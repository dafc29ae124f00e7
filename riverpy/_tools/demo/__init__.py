"""What `riverpy demo` runs."""
