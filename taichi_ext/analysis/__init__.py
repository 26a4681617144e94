"""Questions about programs, each answered by a function of the program alone."""
