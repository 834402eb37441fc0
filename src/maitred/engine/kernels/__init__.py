"""Kernels for a step where plain torch is too slow, each with its plain-torch reference."""
