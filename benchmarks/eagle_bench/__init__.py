"""EAGLE heads: how much they are worth, and what a step of them costs."""
