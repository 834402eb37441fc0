"""Ended requests, told to whoever counts them some at a time.

To count one request takes some twenty sums, each in another place of the program, and the next request has driven them
all from the processor's caches before they are used again. Some at a time, each place is gone to once. Nobody can tell
the difference: whoever shows what was counted asks for what has come since (`fold`) before it looks.
"""

from maitred.core.answer import RequestContext, RequestObserver

_MOST = 32
"""Requests that are put aside."""
_MOST_TOKENS = 50_000
"""Of their prompts together: as long as a request is not counted, all that it asked is kept."""


class ObserverBatch:
    """Implements `maitred.core.answer.RequestObserver`.

    Args:
        observers: Who counts. Whoever shows what it has counted asks to `fold` first.
    """

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = [*observers]
        self._pending: list[RequestContext] = []
        self._tokens = 0

    def add_observers(self, *observers: RequestObserver) -> None:
        """These count too, from the next request on."""
        self.fold()
        self._observers += observers

    def on_request_end(self, *contexts: RequestContext) -> None:
        """See `RequestObserver`."""
        ended = self._pending
        ended += contexts
        for context in contexts:
            self._tokens += context.prompt_tokens
        if len(ended) >= _MOST or self._tokens > _MOST_TOKENS:
            self.fold()

    def fold(self) -> None:
        """Has all counted that have ended."""
        if ended := self._pending:
            self._pending, self._tokens = [], 0
            for observer in self._observers:
                observer.on_request_end(*ended)
