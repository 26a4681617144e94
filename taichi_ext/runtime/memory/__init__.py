"""Tangents of fields and arrays in memory; saved state."""
