"""A draft worker over gRPC: what `benchmarks/draft_service.py` runs."""
