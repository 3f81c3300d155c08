"""Outrider: lossless tree-speculative decoding as a gRPC service."""

__version__ = "0.1.0"
