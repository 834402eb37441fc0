import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ProtocolViolation
from maitred.core.secret import Secret
from maitred.wire.frames import MAX_FRAME_BYTES
from maitred.wire.link.handshake import MAGIC, NONCE_BYTES, DialerHandshake, ListenerHandshake

SECRET = Secret("a secret that both know", "{env: A}")


def cut(data, sizes):
    """The same bytes in pieces."""
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


@given(st.lists(st.integers(0, 40), max_size=8), st.lists(st.integers(0, 40), max_size=8), st.binary(max_size=50))
def test_it_succeeds_however_the_bytes_are_cut_and_loses_none_that_follow(first, second, rest):
    engine, gateway = ListenerHandshake(SECRET, b"b"), DialerHandshake(SECRET, b"b")
    answer = b"".join(gateway.feed(piece) for piece in cut(engine.opening, first))
    proven = None
    for piece in cut(answer + rest, second):
        proven = engine.feed(piece) if proven is None else (proven[0], proven[1] + piece)
    proof, heard = proven
    assert heard == rest
    for piece in cut(proof + rest, second):
        if gateway.rest is None:
            assert gateway.feed(piece) == b""
        else:
            gateway.rest += piece
    assert gateway.rest == rest


@given(st.integers(0, NONCE_BYTES + 31), st.integers(1, 255))
def test_one_changed_byte_of_the_answer_is_refused(place, change):
    engine, gateway = ListenerHandshake(SECRET), DialerHandshake(SECRET)
    answer = bytearray(gateway.feed(engine.opening))
    answer[place] ^= change
    with pytest.raises(ProtocolViolation, match="does not know the secret"):
        engine.feed(bytes(answer))


@given(st.integers(0, 31), st.integers(1, 255))
def test_one_changed_byte_of_the_proof_is_refused(place, change):
    engine, gateway = ListenerHandshake(SECRET), DialerHandshake(SECRET)
    proof, _ = engine.feed(gateway.feed(engine.opening))
    changed = bytearray(proof)
    changed[place] ^= change
    with pytest.raises(ProtocolViolation, match="does not know the secret"):
        gateway.feed(bytes(changed))


@pytest.mark.parametrize(
    ("engine", "gateway"),
    [
        (ListenerHandshake(SECRET), DialerHandshake(Secret("another secret, longer", "{env: B}"))),
        (ListenerHandshake(SECRET, b"one certificate"), DialerHandshake(SECRET, b"another one")),
        (ListenerHandshake(SECRET, b"one certificate"), DialerHandshake(SECRET)),
    ],
)
def test_secret_and_binding_must_agree(engine, gateway):
    with pytest.raises(ProtocolViolation):
        engine.feed(gateway.feed(engine.opening))


def test_an_answer_serves_once():
    gateway = DialerHandshake(SECRET)
    first, second = ListenerHandshake(SECRET), ListenerHandshake(SECRET)
    answer = gateway.feed(first.opening)
    assert first.feed(answer) is not None
    with pytest.raises(ProtocolViolation):
        second.feed(answer)


def test_a_proof_is_nobody_elses():
    """Even where both ends have drawn the same bytes, the proof of one does not serve the other."""
    same = secrets.token_bytes(NONCE_BYTES)
    gateway = DialerHandshake(SECRET, nonce=same)
    answer = gateway.feed(MAGIC + same)
    with pytest.raises(ProtocolViolation):
        gateway.feed(answer[NONCE_BYTES:])


def test_no_frame_begins_like_an_opening():
    assert int.from_bytes(MAGIC[:4], "big") > MAX_FRAME_BYTES


@given(st.binary(min_size=1, max_size=100).filter(lambda data: not (MAGIC + bytes(99)).startswith(data[:8])))
def test_a_gateway_proves_nothing_to_what_is_no_engine(data):
    gateway = DialerHandshake(SECRET)
    with pytest.raises(ProtocolViolation, match="asks for no secret"):
        gateway.feed(data)
    assert not gateway.proof_sent
