"""Decisions about engines on one machine: pure, with the clock as an argument."""
