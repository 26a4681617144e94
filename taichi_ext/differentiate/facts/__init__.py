"""What is asked of a differentiation, and what is known of its program."""
