"""What the statistics say: for people, for Prometheus and in a report of a run.

====================================  ==================================================================
:mod:`gpuspill.monitoring.catalogue`  what each number is: unit, kind, question it answers, explanation
:mod:`gpuspill.monitoring.samples`    the numbers of a cluster at one moment, and what changed between two
:mod:`gpuspill.monitoring.units`      numbers as text
:mod:`gpuspill.monitoring.prometheus` the numbers for Prometheus
:mod:`gpuspill.monitoring.table`      the numbers as a table for a terminal
:mod:`gpuspill.monitoring.advice`     plain advice computed from the numbers of a run
:mod:`gpuspill.monitoring.page`       one page about a run
====================================  ==================================================================
"""
