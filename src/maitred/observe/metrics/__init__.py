"""Prometheus metrics of a gateway, one module for each subject."""
