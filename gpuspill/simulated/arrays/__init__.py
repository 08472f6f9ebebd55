"""The arrays that live on the simulated device: a stand-in for an array library."""
