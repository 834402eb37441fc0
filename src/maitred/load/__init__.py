"""Load: the tester. It plays users against any OpenAI-compatible server and reports what they would have seen.

The way of a run is the way through the packages::

    spec        what was asked for: target, arrivals, lengths, clients, bounds, objectives
    workload/   spec or trace  ->  sessions of turns, each with its time, tenant, lengths and shared prefixes
    play/       sessions  ->  requests over raw connections, open or closed loop; one record for each
    measure/    records  ->  figures and the result file; whether the tester, not the server, was the limit
    report/     result file  ->  Markdown, HTML, plots
    analysis/   result files  ->  what differs between two, with intervals; the highest rate that meets the objectives
    chaos/      faults on purpose while a load runs, and what must hold nevertheless

Only `play` and `chaos` touch sockets, clocks and processes. Everything else is pure, with seeds as arguments.
"""
