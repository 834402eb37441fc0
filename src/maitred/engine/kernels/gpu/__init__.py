"""Attention backends for accelerators: one plan per step, and several kernels to choose from."""
