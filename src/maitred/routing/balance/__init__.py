"""Load balancing: which of several replicas takes a request. Pure: chance is an argument."""
