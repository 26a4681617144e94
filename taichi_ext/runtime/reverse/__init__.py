"""Reverse mode: a kernel or pipeline runs forward, and the adjoints of its launches run back."""
