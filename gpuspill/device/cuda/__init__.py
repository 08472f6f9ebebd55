"""CUDA devices, by way of a driver; :mod:`gpuspill.device.cuda.driver` is the real one."""
