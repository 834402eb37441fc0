"""`maitred load chaos`: faults on purpose while a load runs, and what must hold nevertheless."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.extras import needing
from maitred.cli.load.run import HtmlOption, OutOption, PlotsOption

EXAMPLES = """
Examples:

    maitred load chaos examples/chaos/engine-killed.yaml

    maitred load chaos plan.yaml --out results/rehearsal
"""


def chaos(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML file: what runs, which load, which faults.")],
    out: OutOption = None,
    html: HtmlOption = True,
    plots: PlotsOption = False,
) -> None:
    """Rehearse faults: play a load in calm, then again while things break, and check what was promised.

    Everything that is broken is mended and everything that is started is stopped at the end, also after Ctrl-C. Exits
    with 1 when a promise did not hold.
    """
    from maitred.cli.load.output import announce, beside, out_path, print_document, write_reports
    from maitred.cli.output.terminal import command_line
    from maitred.config.document import read_document

    with needing("load", "The load tester"):
        from maitred.cli.load.progress import showing
        from maitred.cli.load.session import run_loop
        from maitred.load.chaos import report
        from maitred.load.chaos.plan import ChaosPlan
        from maitred.load.chaos.rehearsal import rehearse
        from maitred.load.chaos.rules import check

        wanted = read_document(ChaosPlan, plan, os.environ, subject="The chaos plan")
        check(wanted)
        path = out_path(out, "chaos")
        # The `maitred` of a plan is this one, also when its environment has not been activated.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        with showing(str(plan)) as watch:
            rehearsal = run_loop(rehearse(wanted, command=command_line(), tell=watch.show, watch=watch))
        rehearsal.save(beside(path, ".json"))
        document = report.outline(rehearsal)
        print_document(document, sections=("Invariants", "Faults", "Load"))
        files = write_reports(document, lambda: report.draw(rehearsal), path, html=html, plots=plots)
        announce([beside(path, ".json"), *files])
    raise typer.Exit(rehearsal.exit_code)
