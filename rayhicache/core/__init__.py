"""What the tier decides: standard library only, no threads, no clock, no I/O."""
