"""Devices: the port through which gpuspill sees one, its adapters, and which arrays live where.

* :mod:`gpuspill.device.port`: the port, and the contract every adapter keeps.
* :mod:`gpuspill.simulated.device.device`: a device in host memory, for tests and for machines
  without a GPU.
* :mod:`gpuspill.device.arrays`: which objects live on a device, and which allocation owns them.

Importing this package imports no device library.
"""
