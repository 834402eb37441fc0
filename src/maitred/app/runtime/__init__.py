"""Runtime of the process: clock, garbage collector, background tasks."""
