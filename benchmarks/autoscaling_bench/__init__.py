"""The autoscaler at work: parts of benchmarks/autoscaling.py."""
