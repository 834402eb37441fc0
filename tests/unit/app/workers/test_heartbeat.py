"""How a process that hangs is found, by the time that its heartbeat has been silent."""

import asyncio

from maitred.app.workers.heartbeat import SILENCE_LIMIT_S, START_LIMIT_S, ProcessHeartbeat, ProcessMonitor


def watched(*pids):
    monitor = ProcessMonitor()
    heartbeats = [ProcessHeartbeat() for _ in pids]
    for pid, heartbeat in zip(pids, heartbeats, strict=True):
        monitor.add(pid, heartbeat)
    return monitor, *heartbeats


def first_found_s(monitor, *, step_s=2.0, until_s=300.0, alive=()):
    """When the first process is found to hang."""
    now_s = 0.0
    while now_s < until_s:
        for heartbeat in alive:
            heartbeat.beat()
        if monitor.hung_pids(now_s):
            return now_s
        now_s += step_s
    return None


def test_only_the_process_whose_heart_has_stopped_is_found():
    monitor, stopped, alive = watched(1, 2)
    stopped.beat()
    monitor.hung_pids(-2.0)
    found_s = first_found_s(monitor, alive=[alive])
    assert SILENCE_LIMIT_S - 2.0 <= found_s <= SILENCE_LIMIT_S + 2.0
    assert monitor.hung_pids(found_s) == [1]
    monitor.remove(1)
    assert first_found_s(monitor, alive=[alive]) is None


def test_a_start_takes_longer():
    monitor, _ = watched(1)
    assert START_LIMIT_S <= first_found_s(monitor) <= START_LIMIT_S + 2.0


def test_who_sleeps_with_its_supervisor_does_not_hang():
    """As when the machine or the whole group of processes was suspended."""
    monitor, heartbeat = watched(1)
    heartbeat.beat()
    assert monitor.hung_pids(0.0) == []
    assert monitor.hung_pids(3600.0) == []
    assert monitor.hung_pids(3602.0) == []
    heartbeat.beat()
    assert first_found_s(monitor, alive=[heartbeat]) is None


async def test_a_process_beats_while_it_works_and_no_longer():
    heartbeat = ProcessHeartbeat()

    async def work():
        await asyncio.sleep(0)
        return 7

    assert await heartbeat.run(work()) == 7
    assert heartbeat.count == 1
