"""Client software of the users: raw HTTP/1.1 connections, incremental parsing, SDK-like retries.

It uses asyncio's transports and a C parser without an HTTP client, because the tester must not be the limit. At five
thousand streams of twenty tokens a second, ten microseconds remain for each event, including the read from the socket.
"""
