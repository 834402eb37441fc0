"""Benchmarks of the gateway: processor time and latency for a request, a stream, a token."""
