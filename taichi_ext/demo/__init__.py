"""The demonstration that ``python -m taichi_ext`` runs."""
