"""Events of all workers of a database. Workers send events only while a client follows them, i.e.
wants to receive them."""
