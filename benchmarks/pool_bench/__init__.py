"""A toy service around the pool; `benchmarks/pool_tokens.py` is its command line."""
