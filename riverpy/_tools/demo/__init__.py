"""The code of `riverpy demo`: the files that the demo compresses, the jobs of the demo, and one run
of these jobs."""
