import msgspec
import pytest

from maitred.core.errors import ReplicaUnavailable
from maitred.core.request import ModelFingerprint
from maitred.fleet.remote import FingerprintCheck
from maitred.testing.script import SCRIPTED_CARD


def card(*digest, dtype="fp32"):
    return msgspec.structs.replace(SCRIPTED_CARD, digest=ModelFingerprint(*digest), dtype=dtype)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (("other", "t", "w"), "its config.json differ"),
        (("s", "other", "w"), "its tokenizer.json differ"),
        (("s", "t", "other"), "its weights differ"),
        (("x", "y", "z"), "config.json and tokenizer.json and weights"),
    ],
)
def test_each_part_must_be_the_same(theirs, says):
    model = FingerprintCheck(ModelFingerprint("s", "t", "w"))
    with pytest.raises(ReplicaUnavailable, match=says):
        model.check(card(*theirs))
    model.check(card("s", "t", "w"))
    model.check(card("s", "", "w"))


def test_the_first_engine_says_what_the_gateways_files_do_not():
    model = FingerprintCheck(ModelFingerprint("s", "t", ""))
    model.check(card("s", "t", "w", dtype="bf16"))
    with pytest.raises(ReplicaUnavailable, match="weights"):
        model.check(card("s", "t", "other", dtype="bf16"))
    with pytest.raises(ReplicaUnavailable, match="computes in fp32 and the other engines in bf16"):
        model.check(card("s", "t", "w", dtype="fp32"))
    model.check(card("s", "t", "w", dtype="bf16"))
