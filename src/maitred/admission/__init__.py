"""Admission decides whether a request may run and how much it may use: reserve, clamp, settle."""
