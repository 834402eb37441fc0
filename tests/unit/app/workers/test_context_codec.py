"""What a worker reports of a request that has ended is what its observers in the controller see."""

import msgspec
import pytest

from maitred.app.workers.context_codec import decode_context, encode_context
from maitred.core.context import CacheResult, CacheStatus, Outcome, RequestContext
from maitred.wire.worker_protocol import RequestEnded


def reported(context):
    """The context as the controller has it."""
    context.close(Outcome.FINISHED, 200, 2.0)
    message = msgspec.msgpack.encode(encode_context(context))
    return decode_context(msgspec.msgpack.decode(message, type=RequestEnded), ())


@pytest.mark.parametrize(
    "cache",
    [
        None,
        CacheResult(CacheStatus.BYPASS),
        CacheResult(CacheStatus.MISS, "name"),
        CacheResult(CacheStatus.HIT, "name", 12.5),
        CacheResult(CacheStatus.COALESCED, "name"),
        CacheResult(CacheStatus.SEMANTIC, "name", 12.5, "certified", 0.93, 0.0041),
    ],
)
def test_what_the_cache_did_is_reported(cache):
    context = RequestContext("req-1", 0.0, model="m", cache=cache, prompt_tokens=3, completion_tokens=4, paid_tokens=2)
    seen = reported(context)
    assert seen.cache == cache
    assert (seen.is_computed, seen.usage, seen.saved_tokens) == (
        context.is_computed,
        context.usage,
        context.saved_tokens,
    )
