"""The tools behind the command `riverpy`: doctor, top, health, bench, demo, dev and the embedded
database. `import riverpy` does not import these modules."""
