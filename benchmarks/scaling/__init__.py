"""How many replicas a load needs, and when."""
