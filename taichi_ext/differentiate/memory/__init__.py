"""Registers, slots and rows, which hold tangents of locals."""
