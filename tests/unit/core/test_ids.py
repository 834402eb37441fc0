"""Request ids: the client's where it is safe to repeat, else ours."""

import pytest

from maitred.core.ids import new_request_id, request_id_from


@pytest.mark.parametrize("offered", ["a", "job-7:step.2_x", "x" * 128])
def test_a_safe_id_is_kept(offered):
    assert request_id_from(offered) == offered


@pytest.mark.parametrize(
    "offered", [None, "", "x" * 129, "a b", "a\n", "é", "sk-mtd-abc-def", "sk-proj-123", "a/b"], ids=repr
)
def test_anything_else_is_replaced_and_never_echoed(offered):
    made = request_id_from(offered)
    assert made.startswith("req-")
    assert made != request_id_from(offered)
    assert not offered or offered not in made


def test_ids_of_ours_can_be_sent_back():
    made = new_request_id()
    assert request_id_from(made) == made
