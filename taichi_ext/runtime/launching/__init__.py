"""Requests, sessions and launches."""
