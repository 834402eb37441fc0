"""The OpenAI API's bytes: decodes and checks requests, encodes responses and stream chunks."""
