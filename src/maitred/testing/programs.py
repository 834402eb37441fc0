"""Real servers need their programs."""


class ProgramMissing(RuntimeError):
    """A program is not installed on this machine. The message says how to get it."""
