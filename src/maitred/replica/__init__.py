"""Clients of replicas: engines (engine protocol) and upstream servers (HTTP), with their health."""
