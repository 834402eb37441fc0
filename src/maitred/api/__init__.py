"""The HTTP edge: routes, streaming, errors as HTTP, disconnects and drain."""
