"""The storage plan of tangents, and the names of columns."""
