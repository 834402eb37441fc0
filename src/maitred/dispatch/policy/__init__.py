"""Policies of dispatch as pure functions and classes: credits, quotas, predictions.

Every time is an argument, in monotonic seconds.
"""
