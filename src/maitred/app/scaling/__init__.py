"""Scaling of models: from the demand that dispatch sees to the number of replicas of a pool."""
