"""What an engine tries out when it starts, so that it need not learn it from the first requests."""
