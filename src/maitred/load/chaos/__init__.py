"""Chaos: faults on purpose against a running installation while a load runs, and what must hold nevertheless.

::

    plan          what is started, which load, which faults when, which promises: a YAML file; rules: what must fit
    rehearsal     start, load in calm, the same load with faults, stop, verdict
    installation  what is tested, from its start to its end; processes: who is who in it; clock: its time of day
    stage         plays the load once, with the timeline of the faults beside it
    faults        one context manager per kind: leaving it undoes it, whatever the reason; link, burst: what they use
    scrape        follows the server's own counters over restarts; meter: what it would bill
    evidence      all that was seen  ->  verdicts, each held, broken, or not checkable and why:
    invariants    answers, accounts and recovery, and what is left at the end
    outcome       the JSON file; report: the file told to people

Every rehearsal plays its load twice with the same seed: first in calm, which gives the answer that each question must
get and the speed to come back to, then with the faults.
"""
