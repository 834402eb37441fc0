"""Weights in the form that is computed with, kept in a file and mapped: made once, shared by all that run the model."""
