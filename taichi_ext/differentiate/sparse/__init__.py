"""Entries of sparse Jacobians: sites, slots, locals with separate columns."""
