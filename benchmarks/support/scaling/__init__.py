"""A fleet in simulated time, policies that scale it, and what hindsight would have ordered."""
