"""Kubernetes for tests: an API server, and a kubelet whose pods are real engine processes."""
