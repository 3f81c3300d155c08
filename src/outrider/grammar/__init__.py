"""Structured output: grammars of requests, compiled once, and the masks of tokens that may come next (torch-free)."""
