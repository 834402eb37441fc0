"""Redis: connections to a server that gateways share."""
