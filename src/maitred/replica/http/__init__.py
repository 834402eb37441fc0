"""HTTP/1.1 client for model servers, without pipelining.

`request_head` encodes requests, `connection` sends one and parses its response, and `pool` reuses the connections to a
server. It has no redirects, cookies, proxies or compressed bodies, because model servers do not use them. A response
that arrives in one piece is parsed in one call.
"""
