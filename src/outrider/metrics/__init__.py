"""Counters that cost an addition, and how Prometheus reads them."""
