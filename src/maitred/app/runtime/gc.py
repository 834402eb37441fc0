"""How often Python looks for garbage that refers to itself.

Nearly everything that a request makes is gone, by reference counts, when the request is (see also
`maitred.api.errors.clear_traceback`). Python cannot know that: it looks through what is new after every 700 objects,
and now and then through everything there is, tokenizers, tables of tenants and all the code included. In a gateway
those looks were a tenth of all CPU time, and the thorough ones pauses of the event loop. So what is there when serving
begins is never looked at again, and the rest seldom.

A look takes about a microsecond an object, and nobody is served meanwhile. A request that waits is some 150 objects, so
the generations must be small as well: where the middle one had half a million, a crowd of 4,000 that waited cost all
streams a pause of 0.7 s.

What has become old is as good as never looked at. That is right for what serves, and leaves one thing that is old when
it is let go of, refers to itself, and comes again and again: the regime of a configuration. For these there is
    `GcSweep`.
"""

import asyncio
import gc

_NEW_OBJECTS = 5_000
"""Beyond those that are gone: 30 requests more than there were."""
_YOUNG, _MIDDLE = 3, 1_000
"""Looks at the younger generation before one at the next."""


_LATER_S = (10.0, 90.0)
"""Those that are busy have let go of a regime by the first; by the second, connections on which nothing is asked have
been closed, which hold the regime of the last request until then."""


class GcSweep:
    """Looks through everything that has come since serving began, some time after a regime was let go of, and again.

    That is a pause of 3 ms where a hundred streams run, and of 50 where it is a thousand.
    """

    def __init__(self) -> None:
        self._due: dict[float, asyncio.TimerHandle] = {}

    def later(self) -> None:
        """Something was let go of. What is let go of until a look is part of it."""
        for after_s in _LATER_S:
            if after_s not in self._due:
                self._due[after_s] = asyncio.get_running_loop().call_later(after_s, self._check, after_s)

    def _check(self, after_s: float) -> None:
        del self._due[after_s]
        gc.collect()


def tune_gc() -> None:
    """Call it once, when everything that stays is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG, _MIDDLE)
