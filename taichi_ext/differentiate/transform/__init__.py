"""The passes over a program: planned, then emitted."""
