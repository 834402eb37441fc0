"""How often Python looks for garbage that refers to itself.

Nearly everything that a request makes is gone, by reference counts, when the request is. Python cannot know that: it
looks through what is new after every 700 objects, and now and then through everything there is, tokenizers, tables of
tenants and all the code included. In a gateway those looks were a tenth of all CPU time, and the thorough ones pauses
of the event loop. So what is there when serving begins is never looked at again, and the rest seldom.
"""

import gc

_NEW_OBJECTS = 20_000
"""Beyond those that are gone: a few MiB."""
_YOUNG, _MIDDLE = 25, 50
"""Looks at the younger generation before one at the next."""


def collect_seldom() -> None:
    """Call it once, when everything that stays is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)
