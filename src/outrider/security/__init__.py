"""Who may talk to whom: certificates of roles, bearer tokens, and what may listen beyond loopback (torch-free)."""
