"""The measurements of `riverpy bench`."""
