"""Migration from gateways whose files name targets: Portkey and Kong."""
