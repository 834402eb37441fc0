"""Automatic model choice: names behind which a model is chosen for each request, by what its prompt looks like."""
