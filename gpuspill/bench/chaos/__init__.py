"""``chaos``: jobs with known answers on a cluster whose workers and files come to harm.

``plan`` derives what happens from a seed, ``jobs`` are the graphs, ``faults`` does the harm,
``trouble`` makes files of a worker slow or unreadable, ``cluster`` runs one round, ``remains``
finds what it left, and ``run`` counts rounds on each arm.
"""
