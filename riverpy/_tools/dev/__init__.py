"""The processes of `riverpy dev`."""
