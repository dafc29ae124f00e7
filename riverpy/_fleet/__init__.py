"""Events of all workers of a database. Workers send them only while a client follows, i.e. wants to
receive, such events."""
