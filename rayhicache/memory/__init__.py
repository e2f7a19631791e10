"""Holds the bytes: the arena of a node, its owner, and what a client asks of the owner."""
