"""Rehearsal of a plan: the calm run, the run with faults, the end and the verdict.

::

    start -> load in calm -> settled -> the same load with faults -> settled -> stop -> judge

However a rehearsal ends (regular end, failure, Ctrl-C, SIGTERM), every fault is undone and what was started is stopped.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from maitred.load.chaos.burst import LoadDriver
from maitred.load.chaos.clock import FakeClock, find_library
from maitred.load.chaos.evidence import ChaosEvidence, EndState
from maitred.load.chaos.installation import RunningInstallation
from maitred.load.chaos.invariants import judge
from maitred.load.chaos.outcome import ChaosRun
from maitred.load.chaos.plan import ChaosPlan
from maitred.load.chaos.rules import check
from maitred.load.chaos.scrape import MetricsPoller
from maitred.load.chaos.stage import ChaosStage
from maitred.load.measure.record import RunProgress
from maitred.load.measure.result import LoadResult
from maitred.load.play import driver
from maitred.load.spec import LoadSpec
from maitred.load.workload.generator import make_workload

SETTLE_S = 15.0
"""Longest wait between two runs if the plan does not limit what may remain."""


def _say_nothing(_: str) -> None:
    """Ignores a progress message, because nobody watches."""


async def rehearse(
    plan: ChaosPlan,
    *,
    command: str = "",
    tell: Callable[[str], None] = _say_nothing,
    watch: Callable[[RunProgress], None] | None = None,
    drive: LoadDriver = driver.run,
) -> ChaosRun:
    """Plays a chaos plan and returns its run.

    Args:
        plan: Plan with the installation, the load, the faults and the promises.
        command: Shell command, for the result.
        tell: Callback that receives a progress message at every stage and fault.
        watch: Callback for progress, about once a second while a load runs.
        drive: Function that plays a load.

    Raises:
        ConfigInvalid, InvalidRequest: The plan cannot be played.
        Unavailable: The installation does not start, or something that the plan needs is not on this machine.
    """
    check(plan)
    workload = make_workload(plan.load).description  # errors in the load are reported before anything is started
    started_unix_s, began_s = time.time(), time.monotonic()
    with _cancelled_by_sigterm(), tempfile.TemporaryDirectory(prefix="maitred-chaos-") as folder:
        installation = RunningInstallation(plan.installation, clock=_clock(plan, Path(folder)))
        tell(f"Waiting until {installation.url} is ready.")
        async with installation, MetricsPoller(installation.url) as follower:
            spec = load_spec(plan, installation.clients_url)
            settle_s = plan.invariants.nothing_left_s or SETTLE_S
            stage = ChaosStage(spec, installation, follower, drive, settle_s=settle_s, tell=tell, watch=watch)
            tell("The load in calm.")
            calm, calm_data, _ = await stage.play(())
            tell("The same load with faults.")
            chaos, chaos_data, faults = await stage.play(plan.faults)
            answers, gauges = follower.answers, dict(follower.counters.latest)
            tell("Ending.")
            await installation.stop()
            last_lines = installation.last_lines()
    end = EndState(
        answers=answers,
        gauges=gauges,
        settled_s=stage.settled_s,
        started_here=installation.started_here,
        exit_code=installation.exit_code,
        leftovers=installation.leftovers,
    )
    evidence = ChaosEvidence(spec, calm, chaos, faults, end=end)
    return ChaosRun.of(
        plan,
        evidence,
        judge(evidence, plan.invariants),
        command=command,
        started_unix_s=started_unix_s,
        seconds=time.monotonic() - began_s,
        calm=LoadResult.of(spec, calm_data, command=command, workload=workload),
        chaos=LoadResult.of(spec, chaos_data, command=command, workload=workload),
        last_lines=last_lines,
    )


def load_spec(plan: ChaosPlan, url: str) -> LoadSpec:
    """Returns the plan's load for this installation, with deterministic questions and answers.

    The words of the prompts come from the plan's seed, so that both phases send the same questions. The temperature is
    0 unless the plan sets one, and every request has a seed.
    """
    target = plan.load.target
    fields = {"temperature": 0, "seed": plan.load.seed} | msgspec.json.decode(target.body, type=dict[str, object])
    body = msgspec.json.encode(fields).decode()
    shape = plan.load.shape
    if shape.text_seed is None:
        shape = msgspec.structs.replace(shape, text_seed=plan.load.seed)
    return msgspec.structs.replace(plan.load, target=msgspec.structs.replace(target, url=url, body=body), shape=shape)


def _clock(plan: ChaosPlan, folder: Path) -> FakeClock | None:
    """Returns a fake clock for the installation, if the plan makes the clock jump."""
    if any(fault.kind == "clock_jump" for fault in plan.faults):
        return FakeClock(folder / "clock", find_library())
    return None


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C (which asyncio handles), so that everything is undone then too."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (ValueError, RuntimeError):  # outside the main thread, the caller handles signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
