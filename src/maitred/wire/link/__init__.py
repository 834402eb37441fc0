"""Authentication and encryption between a gateway and an engine on another machine."""
