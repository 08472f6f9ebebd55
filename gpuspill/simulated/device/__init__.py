"""Parts of the simulated device: its clock, memory, streams and hooks."""
