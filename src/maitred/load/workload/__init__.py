"""Workload: makes sessions of turns from a spec or a trace, and text from a turn.

::

    generator   a spec -> sessions, one after the other
    traces/     published traces, and our own -> sessions
    arrivals    times at which sessions begin
    lengths     lengths of questions, answers and pauses
    sizing      scaled and limited lengths, for a model with a smaller window
    prompts     a turn's lengths and block ids -> text of that many tokens, made of `words`
    session     the types that all of these produce

A workload is a function of the spec and its seed. `terms`, `tables` and `files` parse the short texts of a spec, CSV
rows and compressed files.
"""
