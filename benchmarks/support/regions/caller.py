"""Callers in a region: threads that stay in its namespace and read their answers as they come."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.support.installation import MODEL
from benchmarks.support.regions.installation import GATEWAY_PORT, Region
from benchmarks.support.regions.namespaces import inside

PATIENCE_S = 120.0


@dataclass
class Answer:
    """What one caller has seen of one request.

    Attributes:
        clean: Whether the stream had its last event, and no error.
        began_s: Monotonic time at which it was sent.
        first_s: Seconds until the first token; None: there was none.
        region: Which served it; empty: none.
    """

    began_s: float
    status: int = 0
    text: str = ""
    clean: bool = False
    error: str = ""
    first_s: float | None = None
    region: str = ""
    tokens: tuple[int, int] = (0, 0)
    took_s: float = 0.0


def stream(
    region: Region,
    key: str,
    prompt: str,
    tokens: int,
    headers: Mapping[str, str] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Sends one greedy request from within the region, in this thread; returns the answer, or fills the given one."""
    answer = answer or Answer(time.monotonic())
    body = {
        **{"model": MODEL, "prompt": prompt, "temperature": 0.0, "ignore_eos": True, "max_tokens": tokens},
        **{"stream": True, "stream_options": {"include_usage": True}, "cache": {"no-cache": True}},
    }
    own = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
    try:
        with inside(region.namespace):
            connection = http.client.HTTPConnection(region.address, GATEWAY_PORT, timeout=PATIENCE_S)
            connection.request("POST", "/v1/completions", json.dumps(body), own)
            response = connection.getresponse()
        answer.status = response.status
        answer.region = response.getheader("x-maitred-served-region") or ""
        if response.status != 200:
            answer.error = response.read().decode()
        else:
            _read(response, answer)
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        answer.error = str(error) or type(error).__name__
    answer.took_s = time.monotonic() - answer.began_s
    return answer


def _read(response: http.client.HTTPResponse, answer: Answer) -> None:
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            answer.clean = not answer.error
        elif line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = json.dumps(event["error"])
            for choice in event.get("choices", ()):
                if choice["text"] and answer.first_s is None:
                    answer.first_s = time.monotonic() - answer.began_s
                answer.text += choice["text"]
            if usage := event.get("usage"):
                answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]


class Callers:
    """Threads that each repeat one call until they are stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def repeat(self, call: Callable[[], float]) -> None:
        """Repeats a call, which returns how many seconds to pause after it."""

        def run() -> None:
            while not self._stopped.is_set():
                self._stopped.wait(call())

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        """Waits until each call has ended."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)


class Streams:
    """Streams that run at the same time; each has its prompt as its name."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, region: Region, key: str, prompt: str, tokens: int, headers: Mapping[str, str]) -> None:
        """Begins one."""
        answer = self.answers[prompt] = Answer(time.monotonic())

        def run() -> None:
            stream(region, key, prompt, tokens, headers, answer)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def wait(self) -> dict[str, Answer]:
        """Waits for all of them."""
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        return self.answers
