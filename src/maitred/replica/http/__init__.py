"""HTTP/1.1 client for model servers: one request on a connection at a time, many connections.

`request_head` encodes requests, `connection` carries one request and reads its response, `pool` keeps the connections
to a server. There are no redirects, cookies, proxies or compressed bodies, since model servers have no use for them.
The code is short enough that a response which arrives in one piece is read in one call.
"""
