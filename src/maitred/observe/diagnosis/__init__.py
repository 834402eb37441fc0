"""Diagnosis of a server: pure rules that find what delays requests, from its metrics of a few seconds."""
