"""Rollouts: a new version of a model runs beside the stable one, for some requests and on trial."""
