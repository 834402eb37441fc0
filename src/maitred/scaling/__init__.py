"""Scaling: how many replicas a model needs, before they are needed.

The package is pure: `demand` says what is asked for, `forecast` what will be, `capacity` what one replica serves within
the objectives, `startup_times` how soon another one is ready, and `autoscaler` decides. Time is an argument, so the
controller, benchmarks and simulations run the same code.
"""
