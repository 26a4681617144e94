"""Checks of Jacobians and of rules against differences."""
