"""Progress of a start, as it is logged."""

import logging

import pytest

from maitred.engine.progress import StageProgress


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, [1.0]), (1, [0.0, 1.0]), (4, [0.0, 0.2, 0.5, 0.7, 1.0]), (80, [each / 10 for each in range(11)])],
)
def test_a_stage_is_reported_from_its_beginning_to_its_end(caplog, count, told):
    with caplog.at_level(logging.INFO):
        assert list(StageProgress("Converting").range(count)) == list(range(count))
    assert [record.progress for record in caplog.records] == told
    assert {record.getMessage() for record in caplog.records} == {"Converting"}


def test_a_report_is_made_before_what_it_counts(caplog):
    with caplog.at_level(logging.INFO):
        seen = [len(caplog.records) for _ in StageProgress("Converting").range(2)]
    assert seen == [1, 2]
