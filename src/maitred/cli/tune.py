"""`maitred tune`: how large batches can be on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.extras import needing
from maitred.cli.options import (
    ConfigOption,
    DeviceOption,
    DtypeOption,
    KvMemoryOption,
    ProfileOption,
    SetOption,
    ThreadsOption,
    TinyOption,
    load_settings,
    parse_duration,
    require_model,
)
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.engine.config import EngineConfig
    from maitred.tune.growth import BatchSizeResult
    from maitred.tune.session import TuningRequest, TuningResult

EXAMPLES = """
Examples:

    maitred tune

    maitred tune ./models/Qwen2.5-0.5B-Instruct --itl 50ms --write maitred.yaml

    maitred tune --budget 2m --prompt-tokens 1024 --dry-run --html tuning.html
"""
DEFAULT_ITL = "100ms"


def tune(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder of the model. Default: the one in the configuration."),
    ] = None,
    itl: Annotated[
        str | None,
        typer.Option(
            "--itl",
            metavar="TIME",
            help=f"What 95 % of the times between tokens must stay below. Default: engine.itl_objective_s, or "
            f"{DEFAULT_ITL}.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="COUNT", min=1, help="Tokens of the prompts to measure behind.")
    ] = 256,
    highest: Annotated[
        int, typer.Option("--highest", metavar="COUNT", min=1, max=4096, help="Sequences of the largest batch to try.")
    ] = 256,
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="How long to measure, once the engine has started."),
    ] = "60s",
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="PATH", help="Put the limits into this YAML file, without asking."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no settings, and do not ask.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="PATH", help="Write the plot into this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write a report into this file.")] = None,
    tiny: TinyOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Measure how large batches can be on this machine, and set the limits.

    Starts an engine of its own and lets more and more sequences run together, until the time between tokens breaks its
    objective or more of them give no more. Ctrl-C stops it and changes nothing.
    """
    from maitred.config.edit import set_values, value_lines, write_values
    from maitred.config.loader import DEFAULT_FILE
    from maitred.config.units import parse_seconds

    if write is not None and dry_run:
        raise InvalidRequest("--write and --dry-run exclude each other. Leave one out.")
    loaded = load_settings(
        config,
        settings,
        {
            "profile": ("--profile", profile),
            "model.path": ("MODEL", model),
            "engine.device": ("--device", device),
            "engine.dtype": ("--dtype", dtype),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory_bytes": ("--kv-memory", kv_memory),
        },
        sections=("model", "engine"),
        tiny=tiny,
    )
    objective_s = loaded.config.engine.itl_objective_s or parse_seconds(DEFAULT_ITL)
    if itl is not None:
        objective_s = parse_duration("--itl", itl)
    budget_s = parse_duration("--budget", budget)
    if objective_s is None or not 0 < objective_s <= 60:
        raise InvalidRequest(f"--itl {itl}: write a time up to 60s, such as 50ms.")
    if not 1 <= budget_s <= 3600:
        raise InvalidRequest(f"--budget {budget}: write a time from 1s to 1h.")
    if write is not None and write.exists():
        set_values(write.read_text(encoding="utf-8"), {"engine.max_sequences": 1}, str(write))  # or measure for nothing
    folder = require_model(loaded)
    with needing("load", "Tuning"):
        from maitred.tune.report import verdict
        from maitred.tune.session import TuningRequest

        wishes = TuningRequest(objective_s=objective_s, prompt_tokens=prompt_tokens, highest=highest, budget_s=budget_s)
        tuning = _measure(folder, loaded.config.engine, wishes)
        from rich.console import Console

        from maitred.cli.load.output import STYLES
        from maitred.cli.output.tune_table import print_table

        console = Console(highlight=False)
        print_table(console, tuning)
        note = verdict(tuning)
        console.print(f"\n{note.text}", style=STYLES[note.tone], markup=False, soft_wrap=True)
        _write_reports(tuning, folder.name, svg, html)
    if tuning.limits is None:
        raise typer.Exit(1)
    changes = tuning.limits.settings
    typer.echo(f"\n{value_lines(changes)}")
    if write is None and not dry_run and console.is_terminal:
        path = config or DEFAULT_FILE
        typer.echo()
        write = path if typer.confirm(f"Write this into {path}?") else None
    if write is not None:
        write_values(write, changes)
        typer.echo(f"Written: {write}", err=True)
    if tuning.chosen is None:
        raise typer.Exit(1)


def _measure(folder: Path, config: "EngineConfig", wishes: "TuningRequest") -> "TuningResult":
    """Starts an engine that is held back by nothing but the machine, and tunes on it."""
    import msgspec
    import uvloop

    from maitred.core.clock import SystemClock
    from maitred.fleet.local import LocalEngine, engine_command
    from maitred.tune.session import tune as run

    largest = max(config.step_tokens, wishes.highest)
    config = msgspec.structs.replace(
        config,
        max_sequences=wishes.highest,
        step_tokens=largest,
        itl_objective_s=None,
        min_sequences=1,
        kv_shares={},
        batching_window_s={},
    )

    async def main() -> "TuningResult":
        async with LocalEngine(engine_command(folder, config)) as engine:
            await engine.wait_started()
            return await run(engine.client, wishes, SystemClock(), step_tokens_limit=largest, watch=_tell)

    typer.echo(f"Measuring {folder.name} for up to {wishes.budget_s:g} s, once its engine has started.", err=True)
    return uvloop.run(main())


def _tell(size: "BatchSizeResult") -> None:
    """One line for a trial that has ended."""
    from maitred.load.report.quantity import duration, plural, significant

    typer.echo(
        f"  {plural(size.sequences, 'sequence')}: {significant(size.tokens_per_s)} tokens/s, "
        f"{duration(size.itl_s)} between tokens",
        err=True,
    )


def _write_reports(tuning: "TuningResult", model: str, svg: Path | None, html: Path | None) -> None:
    from maitred.cli.load.output import announce, write_text
    from maitred.cli.output.terminal import command_line
    from maitred.load.report import html as html_report
    from maitred.load.report.canvas import draw_narrow
    from maitred.tune.report import FIGURE, draw, outline

    if svg is None and html is None:
        return
    figures = draw(tuning)
    written = []
    if svg is not None and FIGURE in figures:
        written.append(write_text(svg, figures[FIGURE]))
    if html is not None:
        narrow_figures = draw_narrow(lambda: draw(tuning))
        written.append(
            write_text(html, html_report.write(outline(tuning, model, command_line()), figures, narrow_figures))
        )
    announce(written)
