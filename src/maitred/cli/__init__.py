"""The `maitred` command, one file per verb."""
