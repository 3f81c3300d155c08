"""The process that speaks gRPC for a worker, and the worker's side of it."""
