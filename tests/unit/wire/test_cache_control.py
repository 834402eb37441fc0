"""What callers say about caches is read in full, or refused in a sentence that names the fault."""

import json

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl
from maitred.wire.anthropic.decode import decode_messages
from maitred.wire.cache_control import add_directives, to_cache_control
from maitred.wire.openai.decode import decode_chat, decode_completion, decode_embedding
from maitred.wire.openai.requests import CacheFields
from maitred.wire.responses.decode import decode_compact, decode_responses

USER = [{"role": "user", "content": "Hi"}]
BODIES = {
    "chat": (decode_chat, {"messages": USER}),
    "completion": (decode_completion, {"prompt": "Hi"}),
    "embedding": (decode_embedding, {"input": "Hi"}),
    "messages": (decode_messages, {"messages": USER, "max_tokens": 9}),
    "responses": (decode_responses, {"input": "Hi"}),
    "compact": (decode_compact, {"input": "Hi"}),
}
KNOWN = "cache has only the members no-cache, no-store, ttl, s-maxage, namespace."


def decoded(api, cache):
    decode, body = BODIES[api]
    return decode(json.dumps({"model": "m", **body, "cache": cache}).encode(), strict=True)


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    ("cache", "control"),
    [
        (None, DEFAULT_CACHE_CONTROL),
        ({}, DEFAULT_CACHE_CONTROL),
        (
            dict.fromkeys(("no-cache", "no-store", "ttl", "s-maxage", "namespace")),
            DEFAULT_CACHE_CONTROL,
        ),
        ({"no-cache": True, "no-store": False}, CacheControl(no_cache=True)),
        ({"no-store": True}, CacheControl(no_store=True)),
        ({"ttl": 0.5, "s-maxage": 0}, CacheControl(ttl_s=0.5, max_age_s=0)),
        ({"ttl": 2**31, "s-maxage": 2**31}, CacheControl(ttl_s=2**31, max_age_s=2**31)),
        ({"namespace": "é" * 64}, CacheControl(namespace="é" * 64)),
    ],
)
def test_the_field_of_every_api_means_the_same(api, cache, control):
    assert to_cache_control(decoded(api, cache).cache) == control


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    ("cache", "param", "message"),
    [
        ("no-store", "cache", "cache must be an object or null; got a string."),
        ([], "cache", "cache must be an object or null; got a list."),
        ({"no-cache": 1}, "cache.no-cache", "cache.no-cache must be true or false or null; got an integer."),
        ({"no-store": "true"}, "cache.no-store", "cache.no-store must be true or false or null; got a string."),
        ({"ttl": True}, "cache.ttl", "cache.ttl must be a number or null; got true or false."),
        ({"ttl": "60"}, "cache.ttl", "cache.ttl must be a number or null; got a string."),
        ({"ttl": 0}, "cache.ttl", "cache.ttl must be greater than 0; got 0."),
        ({"ttl": -1}, "cache.ttl", "cache.ttl must be greater than 0; got -1."),
        ({"ttl": 2**31 + 1}, "cache.ttl", "cache.ttl must be at most 2147483648; got 2.14748e+09."),
        ({"s-maxage": -0.5}, "cache.s-maxage", "cache.s-maxage must be at least 0; got -0.5."),
        ({"namespace": ""}, "cache.namespace", "cache.namespace must have 1 to 64 characters; got 0."),
        ({"namespace": "a" * 65}, "cache.namespace", "cache.namespace must have 1 to 64 characters; got 65."),
        ({"namespace": 5}, "cache.namespace", "cache.namespace must be a string or null; got an integer."),
        ({"no_store": True}, "cache.no_store", f"cache.no_store must be left out: {KNOWN}"),
        ({"type": None}, "cache.type", f"cache.type must be left out: {KNOWN}"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(api, cache, param, message):
    with pytest.raises(InvalidRequest) as caught:
        decoded(api, cache)
    assert (caught.value.param, caught.value.message) == (param, message)


def test_store_false_keeps_nothing_and_store_true_is_no_wish():
    assert to_cache_control(None, store=False) == CacheControl(no_store=True)
    assert to_cache_control(None, store=True) is to_cache_control(None) is DEFAULT_CACHE_CONTROL
    assert to_cache_control(CacheFields(ttl=5.0, no_store=False), store=False) == CacheControl(ttl_s=5.0, no_store=True)


@pytest.mark.parametrize(
    ("directives", "control"),
    [
        ("", DEFAULT_CACHE_CONTROL),
        (" , ,", DEFAULT_CACHE_CONTROL),
        ("no-cache", CacheControl(no_cache=True)),
        ("No-Store,ONLY-IF-CACHED", CacheControl(no_store=True, only_if_cached=True)),
        ("max-age=0", CacheControl(max_age_s=0)),
        ("\tMAX-AGE=60 , no-transform", CacheControl(max_age_s=60)),
        ('max-age="7"', CacheControl(max_age_s=7)),
        ("max-age=60, max-age=5, max-age=90", CacheControl(max_age_s=5)),
        ("max-age=" + "9" * 5000, CacheControl(max_age_s=2**31)),
        ("max-age=" + "0" * 50 + "5", CacheControl(max_age_s=5)),
        ('private="no-store, max-age=x", no-cache="a"', CacheControl(no_cache=True)),
        ('x="a\\", no-store", no-cache', CacheControl(no_cache=True)),
        ('x="no-store, no-cache', DEFAULT_CACHE_CONTROL),
        ("max-stale=5, min-fresh=x, s-maxage=3, no-cached, immutable", DEFAULT_CACHE_CONTROL),
    ],
)
def test_the_header_is_a_list_of_directives(directives, control):
    assert add_directives(DEFAULT_CACHE_CONTROL, directives) == control


@pytest.mark.parametrize("age", ["", "=", "=x", "=-1", "=1.5", '="', '=""', "=٣", "= 5", "=5 5", '="5'])
def test_a_malformed_age_is_refused(age):
    with pytest.raises(InvalidRequest, match="max-age of the header cache-control must be a whole number") as caught:
        add_directives(DEFAULT_CACHE_CONTROL, f"no-store, max-age{age}")
    assert caught.value.param == "cache-control"


def test_header_and_body_add_up():
    body = CacheControl(no_cache=True, ttl_s=9, max_age_s=30, namespace="n")
    assert add_directives(body, "no-transform") == body
    assert add_directives(body, "no-store, max-age=60") == CacheControl(True, True, False, 9, 30, "n")
    assert add_directives(body, "max-age=6") == CacheControl(True, False, False, 9, 6, "n")
