"""Processes of roles: their start and end, their leases with coordinators, logs, and the watch over steps."""
