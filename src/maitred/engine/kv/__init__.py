"""KV block management: it assigns block numbers to sequences; the model runner holds the tensors."""
