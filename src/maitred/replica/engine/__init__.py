"""Client of one engine process: connection, streams, load reports."""
