"""Web console: its pages, its login sessions, and the live state that viewers share."""
