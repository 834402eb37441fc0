"""The files of a result, and its summary in the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from maitred.cli.load_progress import time_text
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.load.result import Result
    from maitred.load.summary import Quantiles

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
SUFFIXES = (".json", ".md", ".html")


def out_path(given: Path | None, verb: str) -> Path:
    """The files' common path without a suffix, below a folder that is there.

    Asked before the run, so that an hour of load does not end in a path that cannot be written.

    Args:
        given: What `--out` said.
        verb: Part of the default name in the working directory.

    Raises:
        InvalidRequest: Nothing can be written there.
    """
    import time

    path = given or Path(f"maitred-{verb}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.suffix in SUFFIXES:
        path = path.with_suffix("")
    probe = beside(path, ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}.json: {error.strerror}. Name another place with --out.") from None
    return path


def beside(path: Path, ending: str) -> Path:
    """The file of that ending. Unlike `Path.with_suffix` it keeps a name such as ``v1.2`` whole."""
    return path.with_name(path.name + ending)


def write_text(path: Path, text: str) -> Path:
    """Writes a report.

    Raises:
        InvalidRequest: Nothing can be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another place with --out.") from None
    return path


def write_reports(result: "Result", path: Path, *, html: bool, plots: bool) -> list[Path]:
    """The Markdown and HTML of a result, beside its JSON file; the files that were written."""
    from maitred.load.report import html as html_report
    from maitred.load.report import markdown
    from maitred.load.report.plots import draw

    svgs = draw(result) if html or plots else {}
    files = {name: write_text(beside(path, f"-{name}.svg"), svg) for name, svg in svgs.items()} if plots else {}
    links: Mapping[str, Path] = {name: Path(file.name) for name, file in files.items()}
    written = [write_text(beside(path, ".md"), markdown.render(result, dict(links) or None)), *files.values()]
    if html:
        written.append(write_text(beside(path, ".html"), html_report.render(result, svgs)))
    return written


def print_summary(result: "Result") -> None:
    """The verdict, then the figures, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    summary, objectives = result.summary, result.objectives
    console.print(Text(verdict(result), style="bold" if is_good(result) else "bold red"))
    trusted = result.tester.limit == "none"
    console.print(Text(result.tester.verdict, style="dim" if trusted else "bold yellow"))
    console.print()

    figures = Table(box=None, pad_edge=False, show_header=False)
    outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in summary.outcomes.items())
    figures.add_row("requests", f"{summary.requests:,} counted: {escape(outcomes) or 'none'}")
    figures.add_row("complete", f"{summary.requests_per_s:,.2f} requests/s over {summary.seconds:,.1f} s")
    tokens = f"{summary.output_tokens_per_s:,.0f} output/s, {summary.prompt_tokens_per_s:,.0f} prompt/s"
    cached = (
        f", {summary.cached_tokens / summary.prompt_tokens:.0%} of the prompts cached" if summary.cached_tokens else ""
    )
    figures.add_row("tokens", tokens + cached)
    if _given(objectives):
        met = "-" if summary.attainment is None else f"{summary.attainment:.1%}"
        figures.add_row("goodput", f"{summary.goodput_per_s:,.2f} requests/s; {met} meet {objectives_text(result)}")
    console.print(figures)
    console.print()

    times = Table(box=None, pad_edge=False)
    times.add_column("")
    for name in COLUMNS:
        times.add_column(name, justify="right")
    for name, quantiles in latencies(result):
        times.add_row(name, *(time_text(getattr(quantiles, column)) for column in COLUMNS))
    console.print(times)


def latencies(result: "Result") -> "list[tuple[str, Quantiles]]":
    """The distributions that a summary shows, by their names."""
    summary = result.summary
    named = [
        ("time to first token", summary.ttft),
        ("between tokens", summary.itl),
        ("per output token", summary.tpot),
        ("whole answer", summary.e2e),
    ]
    return [(name, quantiles) for name, quantiles in named if quantiles.count]


def is_good(result: "Result") -> bool:
    """Whether anything was answered, and the objectives, if there are any, were attained."""
    summary, objectives = result.summary, result.objectives
    if not summary.outcomes.get("complete"):
        return False
    return not _given(objectives) or (summary.attainment or 0.0) >= objectives.attainment


def verdict(result: "Result") -> str:
    """One sentence on the server."""
    summary, objectives = result.summary, result.objectives
    complete = summary.outcomes.get("complete", 0)
    if not complete:
        first = next((error for error in result.requests.error if error), "")
        return f"Not a single answer was complete. {first}".strip()
    if _given(objectives):
        attained = "met" if is_good(result) else "missed"
        share = f"{summary.attainment or 0.0:.1%} of the requests meet {objectives_text(result)}"
        return f"Objectives {attained}: {share}; {objectives.attainment:.1%} were wanted."
    return f"{complete:,} of {summary.requests:,} answers were complete."


def objectives_text(result: "Result") -> str:
    """``TTFT ≤ 1.00 s and TPOT ≤ 50.0 ms``."""
    objectives = result.objectives
    named = (("TTFT", objectives.ttft_s), ("TPOT", objectives.tpot_s), ("E2E", objectives.e2e_s))
    return " and ".join(f"{name} ≤ {time_text(limit)}" for name, limit in named if limit is not None)


def _given(objectives: object) -> bool:
    return any(getattr(objectives, name) is not None for name in ("ttft_s", "tpot_s", "e2e_s"))


def announce(files: list[Path]) -> None:
    """Says what was written where."""
    typer.echo(f"Written: {', '.join(str(file) for file in files)}", err=True)
