"""The request for a differentiation, and the facts about its program."""
