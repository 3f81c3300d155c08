"""How long a draft's growth step takes: what `benchmarks/draft_step.py` runs."""
