"""Load tester: plays users against any OpenAI-compatible server, and reports what they would see.

A run passes through the packages in this order::

    spec        settings of the run: target, arrivals, lengths, clients, bounds, objectives
    workload/   spec or trace  ->  sessions of turns, each with its time, tenant, lengths and shared prefixes
    play/       sessions  ->  requests over raw connections, open or closed loop; one record for each
    measure/    records  ->  figures and the result file; whether the tester or the server was the limit
    report/     result file  ->  Markdown, HTML, plots
    analysis/   result files  ->  what differs between two, with intervals; the highest rate that meets the objectives
    chaos/      faults that are injected while a load runs, and what must hold nevertheless

Only `play` and `chaos` touch sockets, clocks and processes. Everything else is pure, with seeds as arguments.
"""
