"""Client of the engine protocol: the gateway's connection to one engine process and its token streams."""
