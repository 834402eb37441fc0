"""Play: sends the sessions of a workload to a server; every request leaves a record.

::

    driver        from the start of a run to its end: open loop or closed
    doors         decides whether a request may still be sent
    conversation  one session: sends its turns one after the other
    target        calibration of the server, and the bytes of a request to it
    client/       connections, answers, retries
    monitor       cost of the tester during the run
"""
