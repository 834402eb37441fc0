"""Load: the tester. It plays users against any OpenAI-compatible server and reports what they would have seen.

The way of a run is the way through the modules::

    spec        what was asked for: target, arrivals, lengths, clients, bounds, objectives
    workload    spec or trace  ->  sessions of turns, each with its time, tenant, lengths and shared prefixes
    prompts     a turn's lengths and block ids  ->  text
    driver      lets the sessions loose, open or closed loop, and keeps one record per request
    client/     one connection per open stream, raw and cheap: a time stamp for every piece of text that arrives
    monitor     what the tester itself costs meanwhile; `cost` says whether it, not the server, was the limit
    result      records  ->  the JSON file
    report/     the JSON file  ->  Markdown, HTML, plots
    compare     two results  ->  what differs, with confidence intervals
    sweep       many runs  ->  the highest rate that still meets the objectives
    chaos/      faults on purpose while a load runs, and what must hold nevertheless

Only `client`, `driver`, `monitor` and `chaos` touch sockets, clocks and processes; everything else is pure, with seeds
as arguments.
"""
