"""Whether what a caller wants an answer to look like can be had, found out before anything is charged."""
