"""`maitred import`: move in from other gateways."""
