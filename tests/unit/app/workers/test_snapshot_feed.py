"""Snapshots of the controller in a worker that is still being assembled."""

from maitred.app.workers.worker import SnapshotFeed
from maitred.wire.worker_protocol import ControllerSnapshot


def snapshot(version):
    return ControllerSnapshot(version, frozenset(), {}, {})


async def test_a_part_that_is_made_late_is_told_the_last_snapshot_and_each_later_one():
    feed = SnapshotFeed()
    seen = []
    feed.on_snapshot(snapshot(1))
    feed.on_snapshot(snapshot(2))  # while the part is made
    feed.add_listener(lambda one: seen.append(one.directory_version))
    feed.on_snapshot(snapshot(3))
    assert seen == [2, 3]
    assert (await feed.first_snapshot).directory_version == 1


async def test_a_part_that_is_made_before_the_first_snapshot_is_told_that_one():
    feed = SnapshotFeed()
    seen = []
    feed.add_listener(lambda one: seen.append(one.directory_version))
    assert seen == []
    feed.on_snapshot(snapshot(1))
    assert seen == [1]
