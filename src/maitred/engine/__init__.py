"""Continuous batching: scheduler, KV cache, models, kernels and sampling behind one socket."""
