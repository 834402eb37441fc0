"""Workload: from a spec or a trace to sessions of turns, and from a turn to text.

::

    generator   a spec -> sessions, one after the other
    traces/     published recordings, and our own -> sessions
    arrivals    when they begin
    lengths     how long questions, answers and pauses are
    sizing      scale and clip, for a model with a smaller window
    prompts     a turn's lengths and block ids -> text of so many tokens, out of `words`
    session     what all of these make

All of it is a function of the spec and its seed. `terms`, `tables` and `files` read the short texts of a spec, CSV rows
and compressed files.
"""
