"""Tools that operate a queue. `import riverpy` loads none of them."""
