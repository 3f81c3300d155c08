"""Parts of benchmarks/structured.py."""
