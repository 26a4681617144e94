"""Linear operators, normal equations, least squares."""
