"""Faults in a running service, on purpose: links misbehave, roles die, and what clients hear must not change."""
