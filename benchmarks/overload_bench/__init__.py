"""A coordinator under more load than it can carry: who is refused, how soon, and what that does to the others."""
