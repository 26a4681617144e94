"""The Python code of a pipeline: numbers, stores and functions with tangents."""
