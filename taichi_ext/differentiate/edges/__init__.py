"""Derivatives that are given: edges, users' rules, stopped and replaced gradients."""
