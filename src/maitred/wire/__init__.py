"""Wire formats: bytes to structs and back, for HTTP APIs, server-sent events, engines and workers. No I/O."""
