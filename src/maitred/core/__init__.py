"""The vocabulary every part speaks: ids, requests, usage, clock, errors and ports. Imports nothing of ours."""
