"""Fakes and conformance functions that ship with maitred, for its own tests and for those of its extensions."""
