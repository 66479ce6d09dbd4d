"""Parts of the router: what it sees, how it remembers, and the rules it can follow."""
