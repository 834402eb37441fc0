"""Three regions, each a network namespace; the line to one of them is cut for a minute, and nothing is overspent.

Each region has a gateway, and an agent that runs a real engine of the bundled model and has dialed the gateways of all
regions; the gateway of its own region has ordered the engine. Redis and PostgreSQL are in the first region. Lines of
40 and 80 ms there and back lose 1 % of the packets. Callers in every region send local requests all the time; others
spend the same small budgets from every region until those run out, many of them during the cut. Streams that run in
another region than their gateway's when the line is cut are compared with the answers that they have undisturbed; so
are those of an engine that is killed. At last one region has more requests than it can run at once, and of each pair of
requests one may leave it: who left has gained if its first token came before that of the one that stayed.

It needs root, for the namespaces.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.support.installation import Key, Organisation
from benchmarks.support.regions.caller import Answer, Callers, Streams, stream
from benchmarks.support.regions.installation import Region, regions_installed
from benchmarks.support.regions.namespaces import region_network
from benchmarks.support.report import Report, percentiles
from benchmarks.support.spending import PRICE

SEED = 20261129
HOME, NEAR, FAR = "home", "near", "far"
ROUND_TRIPS_S = {(HOME, NEAR): 0.04, (HOME, FAR): 0.08, (NEAR, FAR): 0.08}
LOSS = 0.01
SEQUENCES = 4
LONG_TOKENS = 500
SHORT_TOKENS = 8
SPENT_TOKENS = 24
HEALED_WITHIN_S = 60.0
STREAMS = 2
MOST_TRIES = 12
HURRY = {"x-maitred-ttft-ms": "400"}
PAIRS_AT_ONCE = 2
SETTLE_S = 6.0
ANSWER_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        calm_s: Before the cut.
        cut_s: How long the line is cut.
        budgets_usd: Of the keys that are spent.
        pairs: Of requests, of which one may leave its region.
    """

    calm_s: float
    cut_s: float
    budgets_usd: tuple[float, ...]
    pairs: int


FULL = Size(30.0, 60.0, (0.003, 0.004, 0.005, 0.006, 0.007, 0.008), 40)
QUICK = Size(4.0, 8.0, (0.002, 0.004), 4)


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"a cut of {QUICK.cut_s:g} s")
    arguments = parser.parse_args()
    report = Report("regions", seed=SEED, quick=arguments.quick)
    run(report, QUICK if arguments.quick else FULL)
    return report.finish()


def run(report: Report, size: Size) -> None:
    """All of it."""
    free = Key()
    budgets = {f"planted-{n}": (Key(), usd) for n, usd in enumerate(size.budgets_usd)}
    organisations = {"free": Organisation({"all": free})} | {
        name: Organisation({"all": key}, limits={"usd_total": usd}) for name, (key, usd) in budgets.items()
    }
    settings = {
        "admission": {"prices": {"*": PRICE}},
        "counters": {"slice_share": 0.1, "answer_timeout_s": ANSWER_TIMEOUT_S},
        "server": {"heartbeat_s": 250},
    }
    with region_network((HOME, NEAR, FAR)) as network:
        lines = {
            ends: network.connect(*ends, round_trip_s=round_trip_s, loss=LOSS)
            for ends, round_trip_s in ROUND_TRIPS_S.items()
        }
        with regions_installed(network, organisations, settings, sequences=SEQUENCES) as (regions, postgres, database):
            for region in regions.values():
                wait_until(lambda region=region: region.metric("maitred_engine_up") == len(regions))  # type: ignore[misc]
            report.figures["joined_s"] = {name: round(region.joined_s, 2) for name, region in regions.items()}
            to_far = [line for ends, line in lines.items() if FAR in ends]
            spending = Spending(regions, budgets)
            cut_phase(report, size, regions, to_far, free.secret, spending)
            spill_phase(report, size, regions, free.secret)
            killed_phase(report, regions, free.secret)
            time.sleep(SETTLE_S)
            rows = postgres.sql("SELECT tenant || ' ' || sum(cost_nusd) FROM usage GROUP BY tenant", database)
            spending.check(report, dict(row.split() for row in rows.splitlines()))


def wait_until(condition: Callable[[], bool], patience_s: float = 120.0) -> float:
    """Waits until something holds, and returns for how long."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > patience_s:
            raise RuntimeError("The regions did not come to rest.")
        time.sleep(0.05)
    return time.monotonic() - began_s


class Spending:
    """Budgets that callers in all regions spend at the same time."""

    def __init__(self, regions: Mapping[str, Region], budgets: Mapping[str, tuple[Key, float]]) -> None:
        self._regions, self._budgets = regions, budgets
        self._next = dict.fromkeys(regions, 0)
        self.answers: list[tuple[str, str, Answer]] = []

    def spend(self, region: Region) -> float:
        """Spends of the next budget; returns how long to pause."""
        names = list(self._budgets)
        number = self._next[region.name]
        self._next[region.name] = number + 1
        name = names[number % len(names)]
        key, _ = self._budgets[name]
        answer = stream(region, key.secret, f"{region.name} {number} went to", SPENT_TOKENS)
        self.answers.append((region.name, name, answer))
        return 0.02 if answer.clean else 0.1

    def check(self, report: Report, spent_nusd: Mapping[str, str]) -> None:
        """Holds what was spent against the budgets."""
        beyond, figures = 0, {}
        for name, (_, usd) in self._budgets.items():
            nusd = int(spent_nusd.get(name, "0"))
            seen = sum(
                round(1000 * (a.tokens[0] * PRICE["prompt"] + a.tokens[1] * PRICE["output"]))
                for _, budget, a in self.answers
                if budget == name and a.clean
            )
            beyond = max(beyond, nusd - round(usd * 1e9))
            figures[name] = {"usd": usd, "ledger_usd": nusd / 1e9, "clients_saw_usd_at_most": seen / 1e9}
        report.figures["budgets"] = figures
        report.require("spent beyond any budget, in nano-dollars", max(beyond, 0), at_most=0)
        used = sum(int(spent_nusd.get(name, "0")) for name in self._budgets)
        report.figures["part_of_all_budgets_spent"] = used / sum(usd * 1e9 for _, usd in self._budgets.values())


def cut_phase(
    report: Report,
    size: Size,
    regions: Mapping[str, Region],
    to_far: list[Any],
    key: str,
    spending: Spending,
) -> None:
    """Cuts the far region off while all of them work, and heals it."""
    local: list[tuple[str, Answer]] = []
    callers = Callers()

    def call(region: Region, number: list[int]) -> float:
        number[0] += 1
        local.append((region.name, stream(region, key, f"{region.name} local {number[0]} said", SHORT_TOKENS)))
        return 0.1

    for region in regions.values():
        callers.repeat(lambda region=region, number=[0]: call(region, number))  # type: ignore[misc]
        callers.repeat(lambda region=region: spending.spend(region))  # type: ignore[misc]
    calm_s = time.monotonic()
    begin_streams(regions[HOME], key).wait()  # As at the cut, so that both phases have the same load.
    time.sleep(max(0.0, calm_s + size.calm_s - time.monotonic()))
    before_s = time.monotonic()
    streams = begin_streams(regions[HOME], key)
    for line in to_far:
        line.cut()
    cut_s = time.monotonic()
    time.sleep(size.cut_s)
    for line in to_far:
        line.heal()
    healed_s = time.monotonic()
    whole_s = wait_until(
        lambda: all(r.is_whole() and r.metric("maitred_engine_up") == len(regions) for r in regions.values())
    )
    callers.stop()
    answers = {prompt: answer for prompt, answer in streams.wait().items() if answer.region == FAR}
    report.require("streams that ran in the far region when the line was cut", len(answers), at_least=1)
    undisturbed = {p: stream(regions[HOME], key, p, LONG_TOKENS, {"x-maitred-region": HOME}) for p in answers}
    report.figures["cut_streams_took_s"] = sorted(round(answer.took_s, 1) for answer in answers.values())
    report.require("seconds from the heal until everything is whole", whole_s, at_most=HEALED_WITHIN_S)
    compare(report, "of the cut line", undisturbed, answers)
    far_spent = [a for region, _, a in spending.answers if region == FAR and cut_s < a.began_s < healed_s]
    elsewhere = [a for region, _, a in spending.answers if region != FAR and cut_s < a.began_s < healed_s]
    report.figures["spending_during_the_cut"] = {
        "far": {"served": sum(a.clean for a in far_spent), "refused": statuses(far_spent)},
        "elsewhere": {"served": sum(a.clean for a in elsewhere), "refused": statuses(elsewhere)},
    }
    ttfts: dict[str, dict[str, float]] = {}
    report.figures["local_ttft_s"] = ttfts
    for name in regions:
        for phase, lower, upper in (("before", calm_s, before_s), ("cut", cut_s, healed_s)):
            these = [a for region, a in local if region == name == a.region and lower <= a.began_s < upper]
            first_s = [a.first_s for a in these if a.first_s is not None]
            failed = sum(not a.clean for a in these)
            elsewhere_too = sum(r == name != a.region and lower <= a.began_s < upper for r, a in local)
            counts = {"answers": len(these), "failed": failed, "not_local": elsewhere_too}
            ttfts[f"{name}, {phase}"] = {**percentiles(first_s), **counts}
    for name in (HOME, FAR):
        before, during = (ttfts[f"{name}, {phase}"].get("p99", 0.0) for phase in ("before", "cut"))
        report.figures[f"local_ttft_p99_ratio_{name}"] = round(during / before, 3) if before else None
        if not report.quick:
            report.require(f"local TTFT p99 in {name}, cut against before", during / before, at_most=1.5)


def begin_streams(home: Region, key: str) -> Streams:
    """Fills a region with streams, and begins others until some run in the far region."""
    streams = Streams()
    for n in range(SEQUENCES):
        streams.begin(home, key, f"{n} long tales fill", LONG_TOKENS, {"x-maitred-region": HOME})
    time.sleep(0.3)
    streams.begin(home, key, "Then a bear was bound to", LONG_TOKENS, {"x-maitred-region": FAR})
    for n in range(MOST_TRIES):
        headers = {"x-maitred-region": f"{FAR}, {HOME}", **HURRY}
        streams.begin(home, key, f"Once {n} foxes were free to", LONG_TOKENS, headers)
        time.sleep(0.3)
        if sum(a.region == FAR and not a.took_s for a in streams.answers.values()) > STREAMS:
            break
    return streams


def statuses(answers: list[Answer]) -> dict[str, int]:
    """Counts refusals by their status."""
    counts: dict[str, int] = {}
    for answer in answers:
        if not answer.clean:
            counts[str(answer.status)] = counts.get(str(answer.status), 0) + 1
    return counts


def compare(report: Report, which: str, undisturbed: Mapping[str, Answer], answers: Mapping[str, Answer]) -> None:
    """Compares streams with their undisturbed answers: clean ends must be exact, and errors must be said."""
    false_ends = exact = errors = silent = 0
    for prompt, answer in answers.items():
        if answer.clean:
            same = answer.text == undisturbed[prompt].text
            exact += same
            false_ends += not same
        elif answer.error:
            errors += 1
        else:
            silent += 1
    report.figures[f"streams {which}: errors"] = sorted({a.error[:300] for a in answers.values() if a.error})
    report.figures[f"streams {which}"] = {"exact": exact, "errors": errors, "broken": silent, "false": false_ends}
    report.require(f"streams {which} that ended clean with another text", false_ends, at_most=0)
    report.require(f"streams {which} that went on elsewhere, token-exact", exact, at_least=1)


def killed_phase(report: Report, regions: Mapping[str, Region], key: str) -> None:
    """Kills the near region's engine while its gateway's streams run there."""
    prompts = [f"In {n} days a wolf came to" for n in range(STREAMS)]
    undisturbed = {p: stream(regions[NEAR], key, p, LONG_TOKENS) for p in prompts}
    streams = Streams()
    for prompt in prompts:
        streams.begin(regions[NEAR], key, prompt, LONG_TOKENS, {})
    time.sleep(0.6)
    regions[NEAR].kill_engine()
    compare(report, "of a lost replica", undisturbed, streams.wait())


def spill_phase(report: Report, size: Size, regions: Mapping[str, Region], key: str) -> None:
    """Gives the far region more than it can run, and compares who may leave it with who may not."""
    far = regions[FAR]
    gains: list[float] = []
    left = 0
    seen: dict[str, int] = {}
    numbers = iter(range(10**6))
    full = Callers()
    for _ in range(2 * SEQUENCES):
        full.repeat(
            lambda: (
                0.0 * len(stream(far, key, f"{next(numbers)} tales", LONG_TOKENS // 2, {"x-maitred-region": FAR}).text)
            )
        )
    time.sleep(1.0)
    for n in range(size.pairs):
        pair = Streams()
        pair.begin(far, key, f"{n} stays in", SHORT_TOKENS, {"x-maitred-region": FAR})
        pair.begin(far, key, f"{n} may go to", SHORT_TOKENS, HURRY)
        answers = pair.wait()
        stays, goes = answers[f"{n} stays in"], answers[f"{n} may go to"]
        seen[f"{goes.status} {goes.region}"] = seen.get(f"{goes.status} {goes.region}", 0) + 1
        if goes.clean and goes.region not in ("", FAR) and goes.first_s is not None:
            left += 1
            gains.append((stays.first_s if stays.first_s is not None else float("inf")) - goes.first_s)
    full.stop()
    gained = sum(gain > 0 for gain in gains)
    report.figures["spills"] = {
        "pairs": size.pairs,
        "who may leave": seen,
        "left": left,
        "gained": gained,
        "gain_s": percentiles([gain for gain in gains if gain < 1e9]),
    }
    if left:
        report.require("part of the requests that left their region and gained", gained / left, at_least=0.8)


if __name__ == "__main__":
    main()
