"""Tangents in memory, by field and array; what a run changes, kept."""
