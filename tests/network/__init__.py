"""riverpy on a network that breaks, and behind a pooler."""
