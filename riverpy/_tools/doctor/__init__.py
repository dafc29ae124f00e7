"""`riverpy doctor`: checks a database with River's tables and its clients, and names the remedy for
each problem."""
