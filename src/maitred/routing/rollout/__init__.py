"""Rollouts: a new version of a model beside the one that serves, who gets it, and whether it may stay."""
