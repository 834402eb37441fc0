"""OpenAI's Responses API: requests, input items, the response and the events of its stream."""
