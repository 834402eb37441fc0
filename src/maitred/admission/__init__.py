"""Admission: whether a request may run now, and how much it may use: reserve, clamp, settle."""
