"""Upstreams: servers of other operators as replicas, by OpenAI's HTTP API or Anthropic's.

A request passes through the modules in this order: `request_body` encodes it as the server's entry in `dialects` wants
it, `replica` sends it, `stream` reads the bytes of the response, `openai_stream` (or `anthropic`) parses them into
deltas or finds what is wrong with them, and `errors` maps a rejection to an error for the caller. Meanwhile `probe`
checks whether the server is up at all.
"""
