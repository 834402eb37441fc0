"""Anthropic's Messages API, both ways: what its clients send us, and what we send to servers that speak it.

Pure translation between Messages and the chat completions of `maitred.wire.openai`; bytes and structs, no I/O.
"""
