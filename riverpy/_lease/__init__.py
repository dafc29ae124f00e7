"""The leases of user code: held in a table or in memory, renewed and stood by for by one keeper a
process."""
