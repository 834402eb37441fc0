"""How the cores of a machine are shared out."""

import os

import pytest

from maitred.engine.threads import step_threads


@pytest.mark.parametrize(
    ("cores", "engines", "each"), [(16, 1, 15), (16, 3, 5), (16, 4, 3), (2, 1, 1), (2, 3, 1), (1, 1, 1), (31, 10, 3)]
)
def test_engines_share_the_cores_and_one_is_left(monkeypatch, cores, engines, each):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert step_threads(0, 1 / engines) == each


def test_what_is_configured_is_what_each_engine_takes():
    assert step_threads(7, 0.25) == 7
