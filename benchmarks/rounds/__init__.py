"""A target's rounds in process, without a service around them: what `python benchmarks/rounds` runs."""
