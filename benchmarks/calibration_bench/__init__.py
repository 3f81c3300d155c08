"""What a draft's acceptance estimates are worth, and how much of its trees the target accepts."""
