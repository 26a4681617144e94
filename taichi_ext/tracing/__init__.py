"""A kernel with tangents, built while Taichi walks its rewritten source."""
