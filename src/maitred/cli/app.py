"""All commands of `maitred`, put together.

Modules of commands import nothing heavy at the top: `maitred --help` must be quick, and the gateway must run where
torch is not installed. What a command needs, it imports when it runs.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from maitred import __version__
from maitred.cli import (
    cache,
    chat,
    complete,
    config,
    doctor,
    engine,
    explain,
    keys,
    limits,
    models,
    pins,
    replicas,
    rollout,
    scaling,
    semantic_cache,
    serve,
    tenants,
    top,
    tune,
    usage,
    workers,
)
from maitred.cli.group import CONFIGURE, MEASURE, MODELS, SERVE, TALK, TENANTS, WATCH, CommandGroup
from maitred.cli.load import chaos as load_chaos
from maitred.cli.load import compare as load_compare
from maitred.cli.load import docs as load_docs
from maitred.cli.load import report as load_report
from maitred.cli.load import run as load_run
from maitred.cli.load import sweep as load_sweep
from maitred.cli.migration import litellm as import_litellm
from maitred.cli.migration import shadow as import_shadow
from maitred.cli.migration import targets as import_targets

EXAMPLES = """
Examples:

    maitred serve                                 # a small real model on http://127.0.0.1:8000

    maitred chat                                  # talk to it

    maitred serve ./models/Qwen2.5-0.5B-Instruct  # a model of yours

    maitred serve --config maitred.yaml           # servers of others, tenants, limits

    maitred doctor                                # what holds it up

The guide for each seat is in docs/README.md.
"""

app = typer.Typer(
    name="maitred",
    cls=CommandGroup,
    help="Serves large language models to thousands of concurrent users.",
    epilog=EXAMPLES.strip(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Check, show and reload the configuration.",
    rich_markup_mode="markdown",
)
load_app = typer.Typer(
    no_args_is_help=True,
    help="Measure any server with OpenAI's API under load.",
    rich_markup_mode="markdown",
)
tenants_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Create and change organisations and their teams.",
    rich_markup_mode="markdown",
)
keys_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Create, rotate and revoke API keys.", rich_markup_mode="markdown"
)
replicas_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="List, drain and scale the places where models run.",
    rich_markup_mode="markdown",
)
pins_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Keep prefixes of prompts in the KV caches.",
    rich_markup_mode="markdown",
)
cache_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="List and clear answers that are kept for equal requests.",
    rich_markup_mode="markdown",
)
semantic_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Answers that are shared with similar questions.",
    rich_markup_mode="markdown",
)
rollout_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Try a new version of a model on a part of the requests.",
    rich_markup_mode="markdown",
)
models_app = typer.Typer(
    invoke_without_command=True,
    help="List models; load, unload, pin and put them to sleep.",
    epilog=models.EXAMPLES.strip(),
    rich_markup_mode="markdown",
)
workers_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="List and restart the processes that speak HTTP.",
    rich_markup_mode="markdown",
)
import_app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Convert another gateway's configuration, and compare answers.",
    rich_markup_mode="markdown",
)
limits_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Set rate limits and budgets.", rich_markup_mode="markdown"
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"maitred {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serves large language models to thousands of concurrent users."""


def _add(
    to: typer.Typer,
    name: str,
    command: Callable[..., None],
    examples: str = "",
    *,
    panel: str | None = None,
    line: str | None = None,
    hidden: bool = False,
) -> None:
    """Adds a command; its line in the list of commands is its docstring's first unless `line` is given."""
    epilog = examples.strip() or None
    to.command(name, epilog=epilog, hidden=hidden, rich_help_panel=panel, short_help=line)(command)


_add(app, "serve", serve.serve, serve.EXAMPLES, panel=SERVE)
_add(app, "chat", chat.chat, chat.EXAMPLES, panel=TALK)
_add(app, "complete", complete.complete, complete.EXAMPLES, panel=TALK)
_add(app, "engine", engine.engine, engine.EXAMPLES, panel=SERVE)
_add(
    app,
    "agent",
    engine.agent,
    engine.AGENT_EXAMPLES,
    panel=SERVE,
    line="Run the engines of this machine for gateways elsewhere.",
)
_add(
    app,
    "tune",
    tune.tune,
    tune.EXAMPLES,
    panel=MEASURE,
    line="Measure how large batches can be here, and set the limits.",
)
app.add_typer(models_app, name="models", rich_help_panel=MODELS)
models_app.callback()(models.models)
_add(models_app, "list", models.list_models, models.LIST_EXAMPLES)
_add(models_app, "memory", models.memory, models.MEMORY_EXAMPLES)
_add(models_app, "load", models.load, models.LOAD_EXAMPLES)
_add(models_app, "unload", models.unload, models.UNLOAD_EXAMPLES)
_add(models_app, "pin", models.pin, models.PIN_EXAMPLES)
_add(models_app, "unpin", models.unpin, models.UNPIN_EXAMPLES)
_add(models_app, "sleep", models.sleep, models.SLEEP_EXAMPLES)
_add(models_app, "wake", models.wake, models.WAKE_EXAMPLES)
app.add_typer(tenants_app, name="tenants", rich_help_panel=TENANTS)
_add(tenants_app, "list", tenants.list_tenants, tenants.LIST_EXAMPLES)
_add(tenants_app, "create", tenants.create, tenants.CREATE_EXAMPLES)
_add(tenants_app, "show", tenants.show, tenants.SHOW_EXAMPLES)
_add(tenants_app, "update", tenants.update, tenants.UPDATE_EXAMPLES)
_add(tenants_app, "delete", tenants.delete, tenants.DELETE_EXAMPLES)
app.add_typer(keys_app, name="keys", rich_help_panel=TENANTS)
_add(keys_app, "list", keys.list_keys, keys.LIST_EXAMPLES)
_add(keys_app, "create", keys.create, keys.CREATE_EXAMPLES)
_add(keys_app, "generate", keys.generate, keys.GENERATE_EXAMPLES)
_add(keys_app, "rotate", keys.rotate, keys.ROTATE_EXAMPLES)
_add(keys_app, "revoke", keys.revoke, keys.REVOKE_EXAMPLES)
app.add_typer(limits_app, name="limits", rich_help_panel=TENANTS)
_add(limits_app, "list", limits.list_limits, limits.LIST_EXAMPLES)
_add(limits_app, "set", limits.set_limit, limits.SET_EXAMPLES)
_add(limits_app, "delete", limits.delete, limits.DELETE_EXAMPLES)
_add(limits_app, "budgets", limits.budgets, limits.BUDGETS_EXAMPLES)
app.add_typer(replicas_app, name="replicas", rich_help_panel=MODELS)
_add(replicas_app, "list", replicas.list_replicas, replicas.LIST_EXAMPLES)
_add(replicas_app, "agents", replicas.list_agents, replicas.AGENTS_EXAMPLES)
_add(replicas_app, "drain", replicas.drain, replicas.DRAIN_EXAMPLES)
_add(replicas_app, "resume", replicas.resume, replicas.RESUME_EXAMPLES)
_add(replicas_app, "scale", scaling.scale, scaling.SCALE_EXAMPLES)
app.add_typer(workers_app, name="workers", rich_help_panel=MODELS)
_add(workers_app, "list", workers.list_workers, workers.LIST_EXAMPLES)
_add(workers_app, "restart", workers.restart, workers.RESTART_EXAMPLES)
app.add_typer(pins_app, name="pins", rich_help_panel=MODELS)
_add(pins_app, "list", pins.list_pins, pins.LIST_EXAMPLES)
_add(pins_app, "hold", pins.hold, pins.HOLD_EXAMPLES)
_add(pins_app, "release", pins.release, pins.RELEASE_EXAMPLES)
app.add_typer(cache_app, name="cache", rich_help_panel=MODELS)
_add(cache_app, "list", cache.list_answers, cache.LIST_EXAMPLES)
_add(cache_app, "clear", cache.clear, cache.CLEAR_EXAMPLES)
cache_app.add_typer(semantic_app, name="semantic")
_add(semantic_app, "list", semantic_cache.list_scopes, semantic_cache.LIST_EXAMPLES)
_add(semantic_app, "labels", semantic_cache.labels, semantic_cache.LABELS_EXAMPLES)
_add(semantic_app, "reset", semantic_cache.reset, semantic_cache.RESET_EXAMPLES)
_add(semantic_app, "remove", semantic_cache.remove, semantic_cache.REMOVE_EXAMPLES)
app.add_typer(rollout_app, name="rollout", rich_help_panel=MODELS)
_add(rollout_app, "list", rollout.list_rollouts, rollout.LIST_EXAMPLES)
_add(rollout_app, "show", rollout.show, rollout.SHOW_EXAMPLES)
_add(rollout_app, "start", rollout.start, rollout.START_EXAMPLES)
_add(rollout_app, "weight", rollout.weight, rollout.WEIGHT_EXAMPLES)
_add(rollout_app, "switch", rollout.switch, rollout.SWITCH_EXAMPLES)
_add(rollout_app, "promote", rollout.promote, rollout.PROMOTE_EXAMPLES)
_add(rollout_app, "rollback", rollout.rollback, rollout.ROLLBACK_EXAMPLES)
_add(rollout_app, "end", rollout.end, rollout.END_EXAMPLES)
app.add_typer(import_app, name="import", rich_help_panel=CONFIGURE)
_add(import_app, "litellm", import_litellm.litellm, import_litellm.EXAMPLES)
_add(import_app, "shadow", import_shadow.shadow, import_shadow.EXAMPLES)
_add(import_app, "portkey", import_targets.portkey, import_targets.PORTKEY_EXAMPLES)
_add(import_app, "kong", import_targets.kong, import_targets.KONG_EXAMPLES)
_add(app, "usage", usage.usage, usage.EXAMPLES, panel=TENANTS, line="Show what was used, and what it cost.")
_add(app, "doctor", doctor.doctor, doctor.EXAMPLES, panel=WATCH, line="Name what holds a server up, and the remedy.")
_add(app, "explain", explain.explain, explain.EXAMPLES, panel=WATCH, line="Tell what happened to a request, and why.")
_add(app, "top", top.top, top.EXAMPLES, panel=WATCH, line="Show queues, batches, replicas and tenants, every second.")
app.add_typer(load_app, name="load", rich_help_panel=MEASURE)
_add(load_app, "run", load_run.run, load_run.EXAMPLES)
_add(load_app, "sweep", load_sweep.sweep, load_sweep.EXAMPLES)
_add(load_app, "compare", load_compare.compare, load_compare.EXAMPLES)
_add(load_app, "chaos", load_chaos.chaos, load_chaos.EXAMPLES)
_add(load_app, "report", load_report.report, load_report.EXAMPLES)
_add(load_app, "docs", load_docs.docs, hidden=True)
app.add_typer(config_app, name="config", rich_help_panel=CONFIGURE)
_add(config_app, "check", config.check, config.CHECK_EXAMPLES)
_add(config_app, "show", config.show, config.SHOW_EXAMPLES)
_add(config_app, "running", config.running, config.RUNNING_EXAMPLES)
_add(config_app, "reload", config.reload, config.RELOAD_EXAMPLES)
_add(config_app, "docs", config.docs, hidden=True)
