"""The users' software: raw HTTP/1.1 connections, an incremental reader of answers, the retries of the official SDKs.

Written on the transport and a C parser, without an HTTP client between, because the tester must not be the limit: five
thousand streams of twenty tokens a second leave ten microseconds for an event, the socket's read included.
"""
