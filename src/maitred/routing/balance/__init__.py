"""Load balancing: chooses the replica of a request; random numbers are passed in as an argument."""
