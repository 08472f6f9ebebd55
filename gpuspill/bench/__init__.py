"""Benchmarks that put gpuspill beside stock spilling and beside no spilling at all.

``arms`` says how each contestant configures a cluster, ``probes`` and ``watch`` measure a worker
from the inside, ``runner`` interleaves the runs and reduces them, ``report`` writes tables and
JSON, and ``commands`` is the command line. Every other module is one benchmark.
``docs/benchmarks.md`` says what each measures and how to reproduce a figure.
"""
