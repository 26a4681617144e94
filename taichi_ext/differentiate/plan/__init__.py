"""Where tangents are kept, and the names of columns."""
