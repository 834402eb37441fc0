"""Embedding models: encoders of the BERT family and pooled decoders, computed in batches without padding."""
