"""Fakes and conformance functions for the tests of maitred and of its extensions, in the repository but in no wheel."""
