"""Health of replicas: which may be sent requests, with which weight, and why not. Pure.

Clock and chance are arguments.
"""
