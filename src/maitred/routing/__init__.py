"""From the model name in a request to what serves it."""
