"""`riverpy doctor`: finds problems of a database with River's tables and of its clients, and names
the remedies."""
