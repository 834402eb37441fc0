"""Forms with files: read in pieces of any size, sent on with the server's name of the model."""

import struct
from contextlib import ExitStack

import pytest

from maitred.api.media.form import FormReader
from maitred.core.errors import BodyTooLarge, InvalidRequest

CONTENT_TYPE = "multipart/form-data; boundary=b0"
FORM = (
    b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nears\r\n'
    b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a.mp3"\r\nContent-Type: audio/mpeg\r\n\r\n'
    b"\x00--b0\r\n-\r\n--b\r\n"
    b"\r\n--b0--\r\n"
)


@pytest.fixture
def read():
    """Reads a form, whose file lives as long as the test."""
    with ExitStack() as stack:

        def read_form(form, piece=None, content_type=CONTENT_TYPE, most=1 << 20):
            reader = stack.enter_context(FormReader(content_type, most))
            for at in range(0, len(form), piece or len(form)):
                reader.feed(form[at : at + (piece or len(form))])
            return reader.finish()

        yield read_form


def sent(body, model="whisper-1", **parameters):
    size, pieces = body.encode(model, parameters)
    written = b"".join(pieces)
    assert len(written) == size
    return written


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 50, None])
def test_the_pieces_make_no_difference(read, piece):
    body = read(FORM, piece)
    assert body.fields() == {"model": "ears"}
    assert sent(body) == FORM.replace(b"ears", b"whisper-1")
    assert sent(body) == FORM.replace(b"ears", b"whisper-1")  # as often as it is needed


def test_fields_that_it_does_not_have_are_added(read):
    written = sent(read(FORM), language="de", n=2)
    again = read(written)
    assert again.fields() == {"model": "whisper-1", "language": "de", "n": "2"}


def test_a_wave_file_says_how_long_it_is(read):
    head = (
        b"RIFF" + struct.pack("<I", 36 + 32_000) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16_000, 2, 16)
    )
    sound = head + b"data" + struct.pack("<I", 32_000) + bytes(32_000)
    form = FORM.replace(b"\x00--b0\r\n-\r\n--b\r\n", sound)
    assert read(form, 1000).audio_s() == (2.0, False)
    endless = sound.replace(struct.pack("<I", 32_000), b"\xff\xff\xff\xff")  # written as it came
    assert read(FORM.replace(b"\x00--b0\r\n-\r\n--b\r\n", endless)).audio_s() == (2.0, False)


def test_other_files_are_estimated_by_their_size(read):
    seconds, is_estimated = read(FORM.replace(b"\x00--b0", bytes(160_000) + b"--b0")).audio_s()
    assert is_estimated
    assert seconds == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize(
    ("form", "content_type", "words"),
    [
        (FORM, "multipart/form-data", "boundary"),
        (FORM, "multipart/form-data; boundary=" + "x" * 71, "boundary"),
        (FORM[:-8], CONTENT_TYPE, "last boundary"),
        (b"no form at all", CONTENT_TYPE, "last boundary"),
        (FORM.replace(b'name="model"', b"nothing"), CONTENT_TYPE, "without a name"),
        (b"--b0\r\n" + b"x" * 9000, CONTENT_TYPE, "head without an end"),
        (FORM.replace(b"ears", b"e" * 300_000), CONTENT_TYPE, "'model' is longer than 262,144 bytes"),
        (FORM.replace(b"--b0--", b"") + FORM[: FORM.index(b"\r\n--b0") + 2] * 300, CONTENT_TYPE, "more than 256 parts"),
    ],
)
def test_what_is_no_form_is_said(read, form, content_type, words):
    with pytest.raises(InvalidRequest, match=words):
        read(form, content_type=content_type)


def test_a_form_that_is_too_large_is_not_read_on(read):
    with pytest.raises(BodyTooLarge, match="larger than 100 bytes"):
        read(FORM, 10, most=100)
