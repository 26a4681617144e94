"""Prepared forms, kept and shown."""
