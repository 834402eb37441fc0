"""Analysis of several load results together.

::

    statistics   resampling of blocks of a run; intervals that hold for all figures at once
    figures      the figures that are compared, and how each is resampled
    compare      two sets of results  ->  what differs
    comparison   the result of `compare`, as a file
    sweep        trial after trial  ->  the highest rate that meets the objectives
"""
