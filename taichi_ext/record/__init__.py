"""A kernel's source, rewritten into calls that a tracer understands."""
