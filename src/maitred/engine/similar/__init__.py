"""Similar questions: search, and a verifier that judges whether two questions have the same answer.

It runs in the process of the encoder, where vectors and token states are. Whether a judgement is good enough to serve
is not decided here but in `maitred.cache.semantic`.
"""
