"""The web console: its pages, who is logged in, and the state that viewers share."""
