"""HTTP API of the gateway: routes, streaming, errors as HTTP responses, disconnects and drain."""
