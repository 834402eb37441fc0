"""Plots and tables for README and docs, rendered from result files."""
