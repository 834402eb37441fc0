"""Analysis of several load results together.

::

    statistics   drawing blocks of a run again; intervals that hold for all figures at once
    figures      the figures that are compared, and how each is drawn again
    compare      two sets of results  ->  what differs
    comparison   what compare found, as a file
    sweep        trial after trial  ->  the highest rate that meets the objectives
"""
