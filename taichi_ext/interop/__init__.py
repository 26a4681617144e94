"""Other libraries: torch."""
