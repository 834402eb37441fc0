"""Health of replicas: which replicas may receive requests, and with which weight.

The classes hold state, but have neither I/O nor a clock: the time and the random source are arguments.
"""
