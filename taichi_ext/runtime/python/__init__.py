"""What the Python code of a pipeline does."""
