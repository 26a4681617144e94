"""What solvers take: linear operators, normal equations, least squares."""
