"""What the simulator is made of; `benchmarks/simulate.py` is its command line."""
