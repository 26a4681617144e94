"""Differentiate a program: the result also computes tangents."""
