"""Finds what is wrong with a database of River's and the clients on it, and says what to do."""
