"""The kernel benchmark: cases by group of operators, and how they are timed and reported."""
