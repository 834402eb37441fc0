"""Servers of others as replicas: anything that speaks OpenAI's HTTP API.

The way of a request is the way through the modules: `writing` puts it into the words of the server's `dialects` entry,
`server` sends it, `stream` reads the bytes, `answer` makes parts of them or finds what is wrong with them, and
`failures` says what a refusal means to the caller. Meanwhile `probe` looks whether the server is there at all.
"""
