"""How a gateway and an engine on another machine come to trust each other."""
