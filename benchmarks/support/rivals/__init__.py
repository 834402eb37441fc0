"""Other engines: how each is installed, started and asked."""
