"""Reading of GGUF files, the format of llama.cpp: metadata, tokenizer and weights in one file."""
