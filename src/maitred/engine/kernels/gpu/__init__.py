"""Attention on an accelerator: one plan of a step, and whichever of several kernels the machine has."""
