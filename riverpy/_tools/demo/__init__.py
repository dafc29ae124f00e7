"""The run of `riverpy demo`."""
