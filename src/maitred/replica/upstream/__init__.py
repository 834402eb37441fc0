"""Upstreams: servers of other operators, used as replicas over OpenAI's or Anthropic's HTTP API.

A request passes through the modules in this order: `request_body` encodes it in the server's dialect (`dialects`),
`replica` sends it to the server's `url`, `stream` reads the response, `openai_stream` or `anthropic` parses it into
deltas, and `errors` maps a rejection to an error for the caller. In the background, `probe` checks whether the server
is up.
"""
