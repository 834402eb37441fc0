"""Calls of tools in what a model writes: one parser for each way to write them, fed as the text comes."""
