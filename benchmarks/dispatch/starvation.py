"""Nobody starves: background requests beside interactive ones that take all there is.

Users with the highest priority keep three times as many requests open as the server has places. Now and then a request
of the lowest priority comes. Every `ageing_s` a waiting request competes in the next more urgent class, of which there
are three above its own, so it is among the interactive ones after three times that, and its turn comes within the time
that an interactive request takes at most. Three servers, one after the other:

* *fair*: as it comes; there the classes have shares, so that background work need not even age.
* *fair, no share*: interactive requests weigh a million times as much, so that only ageing helps.
* *priority*: strict classes with ageing.
"""

import argparse
import asyncio
import random
import sys
from typing import Any

import uvloop

from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import Report, percentiles
from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import SLOTS, Settings, merged, ordered_by, served, settled, unbounded
from benchmarks.support.traffic import Sort, Visit, play, play_closed, visit
from maitred.core.flow import PriorityClass
from maitred.testing.server_process import ServerProcess

SEED = 20261125
SECONDS, QUICK_SECONDS = 45.0, 20.0
AGEING_S = 3.0
CLASSES_ABOVE = PriorityClass.BACKGROUND.rank
PROMPT, OUTPUT = (20, 60), (40, 80)
USERS = 3 * SLOTS
EVERY_S = 1.5
SETTLE_IN_S = 2.0
SERVERS: dict[str, Settings] = {
    "fair": ordered_by("fair", ageing_s=AGEING_S),
    "fair, no share": ordered_by("fair", ageing_s=AGEING_S, class_weights={"interactive": 1e6, "background": 1.0}),
    "priority": ordered_by("priority", ageing_s=AGEING_S),
}


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the strict classes only, and shorter")
    arguments = parser.parse_args()
    report = Report("starvation", seed=SEED, quick=arguments.quick)
    report.figures |= {"ageing_s": AGEING_S, "interactive_users": USERS, "slots": SLOTS}
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    organisations = {name: Organisation({"key": Key()}) for name in ("screen", "night")}
    keys = {name: organisation.keys["key"].secret for name, organisation in organisations.items()}
    for name in ["priority"] if arguments.quick else SERVERS:
        with served(organisations, merged(unbounded(), SERVERS[name])) as server:
            figures = uvloop.run(run(server, keys, seconds))
        report.figures[name] = figures
        print(name, figures, flush=True)
        report.require(f"{name}: background requests that came to their end", figures["whole_share"], at_least=1)
        report.require(f"{name}: slowest over its bound", figures["slowest_over_bound"], at_most=1)
        report.require(f"{name}: part of the service that was interactive", figures["interactive_part"], at_least=0.5)
    return report.finish()


async def run(server: ServerProcess, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    """Many interactive users for some seconds, and background requests beside them."""
    screen = Sort("screen", keys["screen"], PROMPT, OUTPUT, {"x-maitred-priority": PriorityClass.INTERACTIVE.value})
    night = Sort("night", keys["night"], PROMPT, OUTPUT, {"x-maitred-priority": PriorityClass.BACKGROUND.value})
    client = Client(server.url, patience_s=3600)
    rng = random.Random(SEED)
    latest_s = seconds - SETTLE_IN_S - CLASSES_ABOVE * AGEING_S - 6.0
    background = [visit(night, rng, n * EVERY_S) for n in range(max(1, int(latest_s / EVERY_S)))]

    async def come_later() -> None:
        await asyncio.sleep(SETTLE_IN_S)
        await play(client, background, until_s=seconds - SETTLE_IN_S)

    async with asyncio.TaskGroup() as group:
        interactive = group.create_task(play_closed(client, {screen: USERS}, seconds=seconds, seed=f"{SEED}"))
        group.create_task(come_later())
    await settled(server)
    client.close()
    return _figures(interactive.result(), background, seconds)


def _figures(interactive: list[Visit], background: list[Visit], seconds: float) -> dict[str, Any]:
    interactive_s = [visit.ended_s - visit.due_s for visit in interactive if visit.whole]
    whole = [visit for visit in background if visit.whole]
    took_s = [visit.ended_s - visit.due_s for visit in whole]
    bound_s = CLASSES_ABOVE * AGEING_S + max(interactive_s)
    tokens = [sum(visit.tokens for visit in visits) for visits in (interactive, background)]
    return {
        "background_requests": len(background),
        "whole_share": round(len(whole) / len(background), 4),
        "background_s": {**percentiles(took_s), "most": round(max(took_s, default=seconds), 3)},
        "interactive_s": percentiles(interactive_s),
        "bound_s": round(bound_s, 3),
        "slowest_over_bound": round(max(took_s, default=float("inf")) / bound_s, 3),
        "interactive_part": round(tokens[0] / sum(tokens), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
