"""What is measured of the target: whether its tokens depend on the round, and its speed beside transformers."""
