"""Measurement: turns records into figures, by definitions that are all in one module.

::

    record    what one user saw of one request
    columns   all records, column by column, as they are in the result file
    times     definitions of TTFT, ITL, TPOT and end-to-end time
    summary   quantiles, rates, attainment, goodput
    series    the same over time
    cost      cost of the tester itself, and whether it was the limit
    result    all of it, as a file
"""
