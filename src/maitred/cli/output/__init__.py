"""Output of commands: tables, screens, and what goes through a pipe."""
