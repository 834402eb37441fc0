"""Text to vectors: BERT-class encoders, computed in batches without padding."""
