"""The tensor-parallel benchmark: steps of a model that several GPUs share, and what their sums over ranks take."""
