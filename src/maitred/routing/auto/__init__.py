"""Automatic model choice: some names select a model for each request from the form of its prompt."""
