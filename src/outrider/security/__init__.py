"""Security: certificates of roles, bearer tokens, and rules for non-loopback binds (torch-free)."""
