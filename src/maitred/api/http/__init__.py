"""HTTP/1.1 server: protocol, fast path, cached request heads, accepting connections."""
