"""Request bodies with a Content-Encoding."""

import gzip
import zlib

import pytest

from maitred.api.compression import decompress, read_coding
from maitred.core.errors import BodyTooLarge, InvalidRequest, UnsupportedBody

BODY = b'{"model": "m"}' * 1000
LIMIT_BYTES = len(BODY)


@pytest.mark.parametrize("value", [None, "", "identity", " Identity ", " , ", "identity,identity"])
def test_a_body_may_be_uncompressed(value):
    assert read_coding(value) is None


@pytest.mark.parametrize("value", ["zstd", "br", "gzip, gzip", "gzip,deflate", "gzip;q=1", "x" * 1000])
def test_other_codings_are_refused_by_name(value):
    with pytest.raises(UnsupportedBody, match="Content-Encoding") as caught:
        read_coding(value)
    assert len(caught.value.message) < 300


BARE = zlib.compressobj(wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZip ", gzip.compress(BODY[:50]) + gzip.compress(BODY[50:])),
        ("x-gzip", gzip.compress(BODY)),
        ("identity, gzip,", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", BARE.compress(BODY) + BARE.flush()),
    ],
    ids=[
        "gzip",
        "gzip in members",
        "x-gzip",
        "list",
        "deflate",
        "bare deflate",
    ],  # the data has the time, and names must be the same anywhere
)
def test_a_body_is_what_was_compressed(value, data):
    coding = read_coding(value)
    assert decompress(data, coding, LIMIT_BYTES) == BODY
    with pytest.raises(BodyTooLarge):
        decompress(data, coding, LIMIT_BYTES - 1)
    with pytest.raises(InvalidRequest, match="incomplete"):
        decompress(data[:-1], coding, LIMIT_BYTES)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decompress(b"{" + data, coding, LIMIT_BYTES)


def test_a_small_body_that_becomes_large_is_not_held():
    with pytest.raises(BodyTooLarge):
        decompress(gzip.compress(b" " * (100 << 20)), "gzip", 1 << 20)


def test_an_empty_body_is_incomplete():
    with pytest.raises(InvalidRequest, match="incomplete"):
        decompress(b"", "gzip", 10)


def test_the_members_of_a_body_are_bounded():
    empty, last = gzip.compress(b"", mtime=0), gzip.compress(b"end", mtime=0)
    assert decompress(empty * 999 + last, "gzip", 10) == b"end"
    with pytest.raises(InvalidRequest, match="1,000 members"):
        decompress(empty * 400_000 + last, "gzip", 10)


def test_a_body_may_end_anywhere_within_a_step():
    for size in range(65_500, 65_570):
        text = bytes(size)
        stored = gzip.compress(text, compresslevel=0, mtime=0)
        assert decompress(stored + stored, "gzip", 2 * size) == text + text
