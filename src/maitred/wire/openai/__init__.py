"""Wire format of the OpenAI API: decodes and checks requests, and encodes responses and chunks."""
