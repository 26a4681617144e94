"""Calls: runs, blocks of columns, results."""
