"""`maitred load sweep`: the highest rate at which a server still meets the objectives."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.extras import needing
from maitred.cli.load.flags import takes_spec
from maitred.cli.load.run import HtmlOption, OutOption, PlotsOption, SpecArgument
from maitred.cli.options import parse_duration
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.load.analysis.sweep import Sweep, SweepTrial
    from maitred.load.measure.result import LoadResult
    from maitred.load.spec import LoadSpec

EXAMPLES = """
Examples:

    maitred load sweep --objective ttft=1s

    maitred load sweep peak.yaml --start-rate 2 --highest 100 --tolerance 10% --trial 2m --out results/knee
"""
PANEL = "Search"


@takes_spec
def sweep(
    spec: SpecArgument = None,
    start_rate: Annotated[
        float | None,
        typer.Option(
            "--start-rate", metavar="NUMBER", help="Sessions per second of the first trial.", rich_help_panel=PANEL
        ),
    ] = None,
    lowest: Annotated[
        float, typer.Option("--lowest", metavar="NUMBER", help="Nothing below is tried.", rich_help_panel=PANEL)
    ] = 0.05,
    highest: Annotated[
        float, typer.Option("--highest", metavar="NUMBER", help="Nothing above is tried.", rich_help_panel=PANEL)
    ] = 1000.0,
    tolerance: Annotated[
        str,
        typer.Option("--tolerance", metavar="SHARE", help="How closely to find the knee.", rich_help_panel=PANEL),
    ] = "5%",
    trial: Annotated[
        str,
        typer.Option("--trial", metavar="TIME", help="Length of a trial, warm-up included.", rich_help_panel=PANEL),
    ] = "60s",
    out: OutOption = None,
    html: HtmlOption = True,
    plots: PlotsOption = False,
    **given: object,
) -> None:
    """Find the highest rate at which a server meets the objectives and keeps up.

    Plays trials in an open loop, doubles the rate until one fails, and closes in. Takes what `run` takes to describe
    the load; `--rate` is the first trial's. Exits with 1 when no rate passed.
    """
    from maitred.cli.load.compare import parse_share
    from maitred.cli.load.output import announce, beside, out_path, print_document, write_reports
    from maitred.cli.output.terminal import command_line

    with needing("load", "The load tester"):
        from maitred.cli.load.session import measure, run_loop
        from maitred.cli.load.spec import read_spec
        from maitred.load.analysis import sweep as search
        from maitred.load.measure.result import LoadResult
        from maitred.load.report import sweep as report
        from maitred.load.workload.generator import make_workload

        wanted = read_spec(spec, given, rate_is_given=True)
        trial_s = parse_duration("--trial", trial)
        if trial_s <= 0:
            raise InvalidRequest(f"--trial {trial}: write a time such as 60s or 2m.")
        path = out_path(out, "sweep")

        async def play(spec: "LoadSpec") -> "LoadResult":
            workload = make_workload(spec)
            data = await measure(spec, workload)
            return LoadResult.of(spec, data, command=command_line(), workload=workload.description)

        found: Sweep = run_loop(
            search.sweep(
                wanted,
                play,
                start_rate=start_rate or wanted.arrivals.rate_per_s or 1.0,
                lowest=lowest,
                highest=highest,
                tolerance=parse_share("--tolerance", tolerance),
                trial_s=trial_s,
                watch=_tell,
                command=command_line(),
            )
        )
        found.save(beside(path, ".json"))
        document = report.outline(found)
        print_document(document)
        files = write_reports(document, lambda: report.draw(found), path, html=html, plots=plots)
        announce([beside(path, ".json"), *files])
    if found.knee_per_s is None:
        raise typer.Exit(1)


def _tell(trial: "SweepTrial") -> None:
    """One line for a trial that has ended."""
    from maitred.load.report.quantity import duration, share, significant

    met = "" if trial.objective is None else f", {share(trial.attainment)} met the objectives"
    typer.echo(
        f"  {significant(trial.rate_per_s)} sessions/s {'passes' if trial.passed else 'fails'}{met}, "
        f"TTFT p95 {duration(trial.ttft_p95_s)}, {significant(trial.output_tokens_per_s)} tokens/s",
        err=True,
    )
