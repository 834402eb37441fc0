"""`maitred load`, one file per verb; the load tester itself is `maitred.load`.

::

    run  sweep  compare  report  chaos    the verbs
    flags      the options that describe a load, from one table
    spec       those options and a YAML file  ->  what is asked for, with all of its faults at once
    session    a run, and what Ctrl-C does to it
    progress   the run as it goes
    output     the files, and the report in the terminal
"""
