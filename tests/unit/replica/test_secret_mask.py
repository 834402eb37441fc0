"""Masks of credentials, where the beginnings of several of them meet at one cut."""

import itertools

import pytest

from maitred.core.inference import TextDelta
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.secret_mask import DeltaMask, SecretMask

SECRETS = ("abcdefgh-1", "xxabcdefgh-2")
"""A cut behind "xxab" may begin either: the second needs more of what came before."""


@pytest.mark.parametrize("secrets", [*itertools.permutations(SECRETS)])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_masked_wherever_it_is_cut_and_whatever_else_it_may_begin(secrets, secret):
    text = f"It is {secret}."
    for cut in range(1, len(text)):
        mask = DeltaMask(secrets)
        pieces = [TextDelta(0, text[:cut]), TextDelta(0, text[cut:]), TextDelta(0, "", finish="stop")]
        told = ""
        for piece in pieces:
            batch = TextBatch([piece])
            batch = mask.apply(batch) if mask.is_concerned(batch) else batch
            told += "".join(part.text for part in batch.parts) if batch is not None else ""
        assert told == f"It is {'*' * len(secret)}."
        assert mask.held == {}


@pytest.mark.parametrize("secret", SECRETS)
def test_so_is_the_body_of_a_stream(secret):
    data = f"It is {secret}.".encode()
    mask = SecretMask(SECRETS)
    for cut in range(1, len(data)):
        told, held = mask.split(data[:cut], body_over=False)
        rest, nothing = mask.split(held + data[cut:], body_over=True)
        assert told + rest == b"It is " + b"*" * len(secret) + b"."
        assert nothing == b""
