"""Routes: from the name in a request to the pools that may serve it, in order, and why the others may not. Pure."""
