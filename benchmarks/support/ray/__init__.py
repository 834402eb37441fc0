"""A Ray cluster on this machine, and an application that streams tokens through it."""
