"""One typed tree of settings: layers, checks, and the sentence for every fault."""
