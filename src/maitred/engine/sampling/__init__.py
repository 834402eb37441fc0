"""From logits to tokens: edits, filters, counter-based draws and log-probabilities."""
