"""Tool calls in a model's answer: one streaming parser for each style in which models write them."""
