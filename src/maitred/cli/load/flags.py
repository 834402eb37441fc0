"""The options that describe a load: one table, from which `run` and `sweep` get their signatures and specs.

Each option writes one setting of `LoadSpec` and takes its text from there, so an option, the YAML file and the page of
settings cannot come to differ.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from maitred.cli.options import lacks_unit
from maitred.config.nodes import ConfigFault, ConfigNode, merge
from maitred.config.sources import Flag, read_overrides
from maitred.config.walker import unwrap
from maitred.core.errors import ConfigInvalid
from maitred.load.spec import LoadSpec


class SpecFlag(NamedTuple):
    """An option and the setting that it writes.

    Attributes:
        name: Of the option.
        key: Dotted name of the setting.
        metavar: What stands for the value in the help; empty for a switch.
        text: In place of the setting's own description.
        value: What a switch writes.
    """

    name: str
    key: str
    metavar: str = ""
    text: str = ""
    value: str = "true"

    @property
    def parameter(self) -> str:
        """Name of the parameter in Python."""
        return self.name.removeprefix("--").replace("-", "_")


SPEC_FLAGS = (
    SpecFlag("--url", "target.url", "URL"),
    SpecFlag("--unix-socket", "target.unix_socket", "PATH"),
    SpecFlag("--model", "target.model", "NAME"),
    SpecFlag("--endpoint", "target.endpoint", "NAME"),
    SpecFlag("--api-key-env", "target.api_key.env", "NAME", "Environment variable with the API key."),
    SpecFlag("--tokenizer", "target.tokenizer", "PATH"),
    SpecFlag("--body", "target.body", "JSON"),
    SpecFlag(
        "--no-stream", "target.stream", text="Ask for whole answers; there is one time per answer.", value="false"
    ),
    SpecFlag("--users", "arrivals.users", "COUNT"),
    SpecFlag("--rate", "arrivals.rate_per_s", "NUMBER"),
    SpecFlag("--process", "arrivals.process", "NAME"),
    SpecFlag("--cv", "arrivals.cv", "NUMBER"),
    SpecFlag("--profile", "arrivals.profile", "PROFILE"),
    SpecFlag("--prompt-tokens", "shape.prompt_tokens", "LENGTHS"),
    SpecFlag("--output-tokens", "shape.output_tokens", "LENGTHS"),
    SpecFlag("--lengths", "shape.lengths", "PATH"),
    SpecFlag("--turns", "shape.turns", "COUNTS"),
    SpecFlag("--think", "shape.think_s", "SECONDS"),
    SpecFlag("--prefixes", "shape.prefixes", "COUNT"),
    SpecFlag("--prefix-tokens", "shape.prefix_tokens", "COUNT"),
    SpecFlag("--trace", "shape.trace", "FORMAT:PATH"),
    SpecFlag("--speed", "shape.speed", "FACTOR"),
    SpecFlag("--scale", "shape.scale", "FACTOR"),
    SpecFlag("--retries", "clients.retries", "COUNT"),
    SpecFlag("--timeout", "clients.timeout_s", "TIME"),
    SpecFlag("--cancel", "clients.cancel_share", "SHARE"),
    SpecFlag("--stall", "clients.stall_share", "SHARE"),
    SpecFlag("--max-open", "clients.max_open", "COUNT"),
    SpecFlag("--duration", "bounds.duration_s", "TIME"),
    SpecFlag("--requests", "bounds.requests", "COUNT"),
    SpecFlag("--warmup", "bounds.warmup_s", "TIME"),
    SpecFlag("--drain", "bounds.drain_s", "TIME"),
    SpecFlag("--attainment", "objectives.attainment", "SHARE"),
    SpecFlag("--seed", "seed", "NUMBER"),
)
_LISTS = (
    ("--objective", "NAME=TIME", "What a good answer is: `ttft=1s`, `tpot=50ms`, `e2e=20s`. Repeatable.", "Objectives"),
    ("--tenant", "NAME=SHARE", "A tenant and its share of the sessions. Repeatable.", "Tenants"),
    ("--set", "KEY=VALUE", "Any setting by its dotted name, such as `arrivals.spread_s=5`. Repeatable.", "Options"),
)
_PANELS = {"": "Options", "shape": "What is asked"}


_TIMES = {"--objective", *(flag.name for flag in SPEC_FLAGS if flag.metavar == "TIME")}
"""Options whose values are durations."""


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a load spec; it gets their values as keyword arguments, for `spec_layer`."""
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]

    @functools.wraps(command)
    def with_spec_flags(**arguments: object) -> None:
        command(**arguments)

    with_spec_flags.__signature__ = inspect.Signature([*own, *_parameters()])  # type: ignore[attr-defined]
    return with_spec_flags


def spec_layer(given: Mapping[str, Any]) -> tuple[ConfigNode, list[ConfigFault]]:
    """The options as the layer above the YAML file, with the faults of their form.

    Raises:
        ConfigInvalid: A ``NAME=VALUE`` has no ``=``.
    """
    overrides: dict[str, object] = {key: Flag("--set", value) for key, value in _pairs("--set", given["set"])}
    for flag in SPEC_FLAGS:
        value = given[flag.parameter]
        if value is not None and value is not False:
            overrides[flag.key] = Flag(flag.name, value if flag.metavar else flag.value)
    for name, value in _pairs("--objective", given["objective"]):
        overrides[f"objectives.{name}_s"] = Flag("--objective", value)
    # A loop of one kind on the command line replaces one of the other kind in the file.
    kinds = {"arrivals.users": "--users", "arrivals.rate_per_s": "--rate"}
    for key, other in zip(kinds, reversed(kinds), strict=True):
        if key in overrides and other not in overrides:
            overrides[other] = Flag(kinds[key], None)
    layer, faults = read_overrides(overrides)
    faults += [
        ConfigFault(given.name, key, f"Must be a time with its unit, such as 500ms, 30s or 2m; not {given.value!r}.")
        for key, given in overrides.items()
        # The setting's name has the unit; the option's has not.
        if isinstance(given, Flag) and given.name in _TIMES and lacks_unit(str(given.value))
    ]
    # Names of tenants may have dots, which would look like sections to `read_overrides`.
    tenants = {
        name: ConfigNode({"share": ConfigNode(share, "--tenant", is_text=True)}, "--tenant")
        for name, share in _pairs("--tenant", given["tenant"])
    }
    return (
        merge(layer, ConfigNode({"tenants": ConfigNode(tenants, "--tenant")}, "--tenant")) if tenants else layer
    ), faults


def _pairs(flag: str, texts: list[str] | None) -> Iterator[tuple[str, str]]:
    for text in texts or []:
        name, equals, value = text.rpartition("=") if flag == "--tenant" else text.partition("=")
        if not equals or not name.strip():
            metavar = next(metavar for name, metavar, *_ in _LISTS if name == flag)
            raise ConfigInvalid(f"{flag} {text}: write it as {flag} {metavar}.")
        yield name.strip(), value.strip()


def _parameters() -> Iterator[inspect.Parameter]:
    """Python's view of the options: texts, so that a wrong one is reported together with all other faults."""
    for flag in SPEC_FLAGS:
        section = flag.key.rpartition(".")[0].partition(".")[0]
        panel = _PANELS.get(section, section.capitalize())
        text = flag.text or describe(flag.key)
        if flag.metavar:
            option = typer.Option(flag.name, metavar=flag.metavar, help=text, rich_help_panel=panel)
            yield _parameter(flag.parameter, Annotated[str | None, option], None)
        else:
            option = typer.Option(flag.name, help=text, rich_help_panel=panel)
            yield _parameter(flag.parameter, Annotated[bool, option], False)
    for name, metavar, text, panel in _LISTS:
        option = typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel)
        yield _parameter(name.removeprefix("--"), Annotated[list[str] | None, option], None)


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def describe(key: str) -> str:
    """Returns the description of a setting of the spec, with its default unless that is to do nothing."""
    field = _settings()[key]
    assert isinstance(field.type, msgspec.inspect.Metadata)
    text = str((field.type.extra_json_schema or {})["description"])
    if field.default in (None, True, False, 0, "0", "{}"):
        return text
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f"{text} Default: {default}."


@functools.cache
def _settings() -> dict[str, msgspec.inspect.Field]:
    """Dotted name of every setting of a load -> what the spec says of it."""
    found: dict[str, msgspec.inspect.Field] = {}
    pending: list[tuple[str, msgspec.inspect.Type]] = [("", msgspec.inspect.type_info(LoadSpec))]
    while pending:
        section, info = pending.pop()
        assert isinstance(info, msgspec.inspect.StructType)
        for field in info.fields:
            key = f"{section}{field.name}"
            found[key] = field
            kind, _ = unwrap(field.type)
            if isinstance(kind, msgspec.inspect.StructType):
                pending.append((f"{key}.", kind))
    return found
