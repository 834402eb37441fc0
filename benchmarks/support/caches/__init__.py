"""Parts that benchmarks of caches share."""
