"""Conversion between text and tokens: tokenizer, chat template, incremental detokenizer and stop strings."""
