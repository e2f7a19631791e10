"""Engines: what runs a model over the pools and asks the tier for what it has seen before."""
