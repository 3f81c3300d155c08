"""Outrider: lossless tree-speculative decoding as a gRPC service."""
