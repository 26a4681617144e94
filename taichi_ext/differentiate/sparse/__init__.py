"""Entries of sparse Jacobians: sites, slots, locals with columns of their own."""
