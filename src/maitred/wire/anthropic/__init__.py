"""Anthropic's Messages API, in both directions: requests of its clients, and requests to servers that speak it.

Pure translation between Messages and the chat completions of `maitred.wire.openai`; bytes and structs, no I/O.
"""
