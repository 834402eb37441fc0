"""Models that a gateway serves: own engines, on demand, encoders, upstreams, and the router in front."""
