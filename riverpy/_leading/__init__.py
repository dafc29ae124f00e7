"""Leader election, the term of a leader, and the queues that a leader maintains."""
