"""Chaos: injects faults into a running installation under load, and checks what must still hold.

::

    plan          what is started, which load, which faults at which times, which promises: a YAML file
    rules         consistency checks of a plan
    rehearsal     start, calm run, run with faults, stop, verdict
    installation  the installation under test, from start to end
    processes     its processes by role; clock: its time of day
    stage         plays the load once, with the timeline of the faults beside it
    faults        one context manager per kind, which undoes the fault on exit in every case
    link, burst   tools of the faults
    scrape        follows the counters of the server over restarts; meter: what the server would bill
    evidence      everything that was observed  ->  verdicts: each promise held, was broken, or could not be checked
    invariants    the promises about answers, accounts, recovery, and what remains at the end
    outcome       the JSON file; report: the file as a report for people

Every rehearsal plays its load twice with the same seed. The calm run gives the reference answer for each question and
the reference speed. The second run adds the faults.
"""
