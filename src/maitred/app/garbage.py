"""How often Python looks for garbage that refers to itself.

Nearly everything that a request makes is gone, by reference counts, when the request is (see also
`maitred.api.errors.let_go_of_frames`). Python cannot know that: it looks through what is new after every 700 objects,
and now and then through everything there is, tokenizers, tables of tenants and all the code included. In a gateway
those looks were a tenth of all CPU time, and the thorough ones pauses of the event loop. So what is there when serving
begins is never looked at again, and the rest seldom.

A look takes about a microsecond an object, and nobody is served meanwhile. A request that waits is some 150 objects, so
the generations must be small as well: where the middle one had half a million, a crowd of 4,000 that waited cost all
streams a pause of 0.7 s.
"""

import gc

_NEW_OBJECTS = 5_000
"""Beyond those that are gone: 30 requests more than there were."""
_YOUNG, _MIDDLE = 3, 1_000
"""Looks at the younger generation before one at the next."""


def collect_seldom() -> None:
    """Call it once, when everything that stays is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)
