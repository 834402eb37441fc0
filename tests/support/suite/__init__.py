"""What the suite is run with: how it starts programs, and compiles."""
