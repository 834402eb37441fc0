"""OpenAI's Responses API: its routes, and how an answer is written as a response."""
