"""Events of all workers: workers send them while clients follow, and clients receive them."""
