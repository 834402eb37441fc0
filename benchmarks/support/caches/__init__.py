"""What benchmarks of caches share."""
