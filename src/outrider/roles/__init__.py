"""What every role's process has: its start and end, its lease with coordinators, its log, its watch over itself."""
