"""Moves pages between nodes: leased at their owner, pulled in chunks, verified before use."""
