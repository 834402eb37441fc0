"""Routing: from the model name in a request to the pool and replica that serve it."""
