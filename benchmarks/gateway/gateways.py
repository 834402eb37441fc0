"""Gateways side by side: what each takes for a request, for a stream and for a key that it does not know.

    python -m benchmarks gateways install [NAME …]       installs the rivals, below the user's cache
    python -m benchmarks gateways                        all parts, all gateways that are installed
    python -m benchmarks gateways --only whole --gateways maitred bare       some gateways: gateways.chosen.json

One upstream, which answers at once or at `PACE_S` a token (see `benchmarks.support.canned_upstream`), one client, and
gateways
that take turns: each has the first core for itself (see `benchmarks.support.gateways.gateway_set` for what is
    configured), client and
upstream share the other. A client that asks the upstream directly says what they alone take; what a gateway adds is
over that. Turns of a round follow each other at once, so a machine that drifts drifts for all; the order turns from
round to round.

Each part (see `benchmarks.support.gateways.gateway_parts`) replaces what the result file had of it, whole, so that no
ratio mixes runs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.support.figures.gateways_plot import plot
from benchmarks.support.gateways.contenders import Contender
from benchmarks.support.gateways.gateway_bars import hold
from benchmarks.support.gateways.gateway_field import Scale, everybody
from benchmarks.support.gateways.gateway_parts import PARTS
from benchmarks.support.gateways.gateway_set import CONTENDERS
from benchmarks.support.report import RESULTS, Report
from benchmarks.support.rivals.rival_results import kept_figures
from maitred.app.runtime import tune_gc

SEED = 20261122
QUICK = Scale(rounds=1, turn_s=0.3, paced_streams=(20, 200), paced_tokens=20, prompt_tokens=20_000)
QUICK_GATEWAYS = ("maitred", "bare", "nginx")


def main() -> int:
    """Installs, or runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("words", nargs="*", metavar="install NAME", help=f"gateways: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help=f"short turns; of gateways {', '.join(QUICK_GATEWAYS)}")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--gateways", nargs="+", choices=names, help="these gateways")
    parser.add_argument("--rounds", type=int, default=Scale.rounds, help="of all gateways in turn")
    arguments = parser.parse_args()
    if arguments.words:
        return install(arguments.words, names, parser)
    chosen = arguments.gateways or (QUICK_GATEWAYS if arguments.quick else names)
    contenders = [contender for contender in CONTENDERS if contender.name in chosen and contender.installed()]
    for one in CONTENDERS:
        if one.name in chosen and one not in contenders:
            print(f"{one.name} is not installed: python -m benchmarks gateways install {one.name}")
    name = "gateways.chosen" if arguments.gateways else "gateways"
    report = Report(name, seed=SEED, quick=arguments.quick)
    report.figures |= {"how": {}, "failed": {}, "parts": {}} | ({} if arguments.quick else kept_figures(name))
    scale = QUICK if arguments.quick else Scale(rounds=arguments.rounds)
    with TemporaryDirectory(prefix="maitred-") as folder:
        uvloop.run(run(contenders, Path(folder), scale, arguments.only, report))
    hold(report)
    if name == "gateways" and not arguments.quick:
        plot(report.figures["parts"], RESULTS / "gateways.svg")
    return report.finish()


def install(words: Sequence[str], names: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Installs the rivals."""
    if words[0] != "install" or set(words[1:]) - set(names):
        parser.error(f"Say `install`, and then any of {', '.join(names)}.")
    for contender in CONTENDERS:
        if contender.install is not None and (len(words) == 1 or contender.name in words):
            print(f"{contender.name}: installing …", flush=True)
            contender.install()
    return 0


async def run(
    contenders: Sequence[Contender], folder: Path, scale: Scale, parts: Sequence[str], report: Report
) -> None:
    """Starts everybody, and measures part by part."""
    tune_gc()
    figures = report.figures
    figures["failed"] = {}
    async with everybody(contenders, folder, scale, figures["failed"]) as field:
        for runner in field.gateways:
            assert runner.gateway is not None
            figures["how"][runner.name] = runner.gateway.contender.how()
        for part in parts:
            started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            print(f"{part}:", flush=True)
            measured = await PARTS[part](field)
            for name, values in measured.items():
                print(f"  {name:10} {', '.join(f'{key} {value:,}' for key, value in values.items())}", flush=True)
            figures["parts"][part] = {"started": started, "commit": report.commit, "gateways": measured}
            report.write()


if __name__ == "__main__":
    sys.exit(main())
