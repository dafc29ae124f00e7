"""`riverpy top`: reads the status of a schema and shows it."""
