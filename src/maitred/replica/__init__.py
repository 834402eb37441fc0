"""One replica as the gateway sees it: transport, health, load report."""
