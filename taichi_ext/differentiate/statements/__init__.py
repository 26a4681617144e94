"""Expressions as forms, and the statements that write locals and containers."""
