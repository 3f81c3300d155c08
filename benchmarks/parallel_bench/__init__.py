"""The tensor-parallel benchmark: rounds of a model that several GPUs share, and what their sums over ranks take."""
