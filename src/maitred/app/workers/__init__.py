"""`maitred serve --workers`: several processes that speak HTTP, and one that decides."""
