"""``gpuspill demo``: real jobs on a small cluster, checked and compared with stock.

``jobs`` says what a job is and compares answers, ``flights`` and ``arrays`` are the two jobs,
``view`` shows a running cluster in the terminal, ``run`` puts it together.
"""
