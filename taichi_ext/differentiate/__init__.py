"""From a program to the program that computes its tangents too."""
