"""The integration with distributed: the only package that imports it.

Imports nothing by itself: the ``dask`` command needs :mod:`~gpuspill.distributed.dask_cuda` alone,
at every start.

============================================  ============================================================
:mod:`~gpuspill.distributed.attach`           switching it on: the one thing behind all ways
:mod:`~gpuspill.distributed.attachment`       what a worker is bound to when it is on
:mod:`~gpuspill.distributed.mapping`          ``Worker.data``
:mod:`~gpuspill.distributed.async_get`        reading several of its values without holding the event loop
:mod:`~gpuspill.distributed.inspection`       what is in it, by tier and in numbers
:mod:`~gpuspill.distributed.blocking`         the warning about reads that stop the worker
:mod:`~gpuspill.distributed.worker`           what is overridden in the worker
:mod:`~gpuspill.distributed.worker_class`     classes to be named in a configuration
:mod:`~gpuspill.distributed.internals`        what is read and changed inside of the worker
:mod:`~gpuspill.distributed.task_inputs`      a task on its way to its inputs
:mod:`~gpuspill.distributed.hints`            what the worker's tasks tell about the future
:mod:`~gpuspill.distributed.memory`           memory settings, and following the process's memory
:mod:`~gpuspill.distributed.serialization`    values to bytes, as dask does it
:mod:`~gpuspill.distributed.takeover`         values that distributed has spilled before
:mod:`~gpuspill.distributed.metrics`          what the manager did, added up
:mod:`~gpuspill.distributed.reporting`        the numbers, and where they are shown
:mod:`~gpuspill.distributed.lost`             what stands for a value that is lost
:mod:`~gpuspill.distributed.parking`          values that a task does not need for a while
:mod:`~gpuspill.distributed.parked`           their keys
:mod:`~gpuspill.distributed.devices`          the worker's device
:mod:`~gpuspill.distributed.settings_report`  the settings in force
:mod:`~gpuspill.distributed.dask_cuda`        what is known of the inside of dask-cuda
:mod:`~gpuspill.distributed.story`            what became of a key
:mod:`~gpuspill.distributed.plugin`           the plugin for running clusters
:mod:`~gpuspill.distributed.factory`          putting a store together
============================================  ============================================================
"""
