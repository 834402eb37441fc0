"""Chaos: faults on purpose against a running installation while a load runs, and what must hold nevertheless.

::

    plan          what is started, which load, which faults when, which promises: a YAML file; rules: what must fit
    installation  starts and stops what is tested; processes: who is who in it
    link          a TCP connection of the installation that can be broken, slowed or cut off
    faults        one context manager per kind of fault: leaving it undoes it, whatever the reason
    timeline      plays the faults beside the load and notes when each one really began and ended
    scrape        follows the server's own counters over restarts; meter: what it would bill
    invariants    records, counters and the fault log  ->  held, broken, or not checkable and why
    rehearsal     calm run, run with faults, settling, verdict
    report        the result as Markdown

Every rehearsal plays its load twice with the same seed: first in calm, which gives the answer that each question must
get and the speed to come back to, then with the faults.
"""
