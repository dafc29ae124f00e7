"""The code of `riverpy demo`: its files, its jobs, and their run."""
