"""Entries of sparse Jacobians, and matrices of them."""
