"""The OpenAI API's bytes: requests read and checked, responses and stream chunks written."""
