"""Migration: configurations of other gateways become ours, with a report on every key of theirs."""
