"""Device memory of cached state, which can only be read through the gate."""
