"""Parts of the simulated device: its clock, memory, streams and hooks. See :mod:`gpuspill.simulated.device.device`."""
