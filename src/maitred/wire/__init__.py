"""Bytes to structs and back: the OpenAI schemas, server-sent events and the engine's frames. No I/O."""
