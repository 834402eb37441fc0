"""HTTP/1.1 as a client of model servers speaks it: one request on a connection at a time, many connections.

`head` writes requests, `connection` carries one and reads its response, `line` keeps the connections to a server. There
are no redirects, cookies, proxies or compressed bodies, since servers of models have no use for them. What is left is
short enough that a response which comes in one piece is read in one call.
"""
