"""Semantic cache: answers of similar questions, served only while it is certified how rarely they are wrong."""
