"""Gradients that users give: the registry of rules, edges, marks."""
