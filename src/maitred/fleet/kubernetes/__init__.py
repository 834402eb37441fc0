"""Engines in the pods of a Kubernetes Deployment."""
