"""What benchmarks/end_to_end.py runs."""
