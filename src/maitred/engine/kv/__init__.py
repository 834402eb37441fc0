"""Who holds which KV block: pure bookkeeping over block numbers; the tensors live with the model runner."""
