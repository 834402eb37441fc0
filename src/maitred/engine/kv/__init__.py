"""KV cache bookkeeping: which sequence holds which block, by block numbers; the model runner has the tensors."""
