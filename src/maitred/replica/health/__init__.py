"""Health of replicas: which replicas may receive requests, and with which weight.

The functions are pure: the time and the random source are arguments.
"""
