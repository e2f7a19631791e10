"""Moves bytes inside a node: devices, the layer transfer counter, the hybrid move path."""
