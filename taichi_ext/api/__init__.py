"""What a call is: its arguments, options and results, prepared forms and their cache."""
