"""What the benchmark of one-graph rounds is made of; `benchmarks/one_graph.py` is its command line."""
