"""Decisions about the engines on one machine: pure, with the clock as an argument."""
