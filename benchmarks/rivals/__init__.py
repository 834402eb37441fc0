"""Benchmarks beside other engines, and conformance of real servers."""
