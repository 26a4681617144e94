"""The tangents of locals: written, added to, read."""
