"""What the benchmarks of the target worker share; `benchmarks/target_step.py` is their command line."""
