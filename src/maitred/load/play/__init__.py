"""The run itself: sessions are let loose on a server, and every request leaves a record.

::

    driver        from the start of a run to its end: open loop or closed
    doors         whether a request may still be sent
    conversation  one session: its turns, one after the other
    target        what is known of the server, and the bytes of a request to it
    client/       connections, answers, retries
    monitor       what the tester costs meanwhile
"""
