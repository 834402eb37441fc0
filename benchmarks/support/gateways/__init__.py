"""Gateways that are compared, and how each is measured."""
