"""Batches of ended requests for observers that count them.

Counting one request takes some twenty additions in different parts of the program, and the next request evicts them
from the processor's caches before they are used again. A batch runs each part once. Readers see no difference, because
pending requests are delivered before counts are shown (`flush_pending`).
"""

from maitred.core.context import RequestContext, RequestObserver

_MAX_REQUESTS = 32
"""Most requests that are pending."""
_MAX_PROMPT_TOKENS = 50_000
"""Most prompt tokens of the pending requests: a request is kept with its prompt until it is counted."""


class ObserverBatch:
    """Batch of ended requests. Implements `maitred.core.context.RequestObserver`.

    Args:
        observers: Observers that count. Before it shows counts, an observer calls `flush_pending`.
    """

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = [*observers]
        self._pending: list[RequestContext] = []
        self._prompt_tokens = 0

    def add_observers(self, *observers: RequestObserver) -> None:
        """Adds observers, which receive requests from the next one on."""
        self.flush_pending()
        self._observers += observers

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Adds ended requests to the batch, and delivers it when it is full."""
        pending = self._pending
        pending += contexts
        for context in contexts:
            self._prompt_tokens += context.prompt_tokens
        if len(pending) >= _MAX_REQUESTS or self._prompt_tokens > _MAX_PROMPT_TOKENS:
            self.flush_pending()

    def flush_pending(self) -> None:
        """Delivers all pending requests to the observers."""
        if pending := self._pending:
            self._pending, self._prompt_tokens = [], 0
            for observer in self._observers:
                observer.on_request_end(*pending)
