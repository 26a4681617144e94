"""A call: its arguments, options and results, prepared forms and their cache."""
