"""Multi-process serving: several worker processes that speak HTTP, and one controller process that decides."""
