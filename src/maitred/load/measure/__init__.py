"""Measurement: records become figures, by definitions that stand in one place.

::

    record    what one user saw of one request
    columns   all records, column by column, as the result file keeps them
    times     TTFT, ITL, TPOT, whole answers: the definitions
    summary   quantiles, rates, attainment, goodput
    series    the same over time
    cost      what the tester itself cost, and whether it was the limit
    result    all of it, as a file
"""
