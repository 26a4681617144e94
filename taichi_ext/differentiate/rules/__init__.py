"""The derivatives of operations and library functions."""
