"""The parts of maitred-tiny's training: text in, a small Llama model folder out.

Read in this order: `corpus` (what is read and what is held out), `chats` (how books become chats),
`vocabulary` (the tokenizer and chat template), `batches` (rows of tokens), `llama` (the network),
`muon` (the optimiser), `measure` (perplexity against a bigram), `export` (the model folder).
`scripts/train_tiny.py` ties them together.
"""
