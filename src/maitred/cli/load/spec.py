"""Spec of `maitred load run` and `sweep`, from a YAML file and the options above it."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maitred.cli.load.flags import spec_layer
from maitred.cli.options import KEY_VARIABLE, URL_VARIABLE
from maitred.config.checks import ConfigConflict
from maitred.config.document import read_document
from maitred.config.nodes import ConfigNode
from maitred.core.errors import CallerError
from maitred.load.spec import LoadSpec

SUBJECT = "The load run"


def read_spec(path: Path | None, given: Mapping[str, Any], *, rate_is_given: bool = False) -> LoadSpec:
    """The spec, sound in itself.

    Args:
        path: The YAML file; None: there are only options.
        given: The values of the options; see `flags.takes_spec`.
        rate_is_given: The command chooses the rate itself, as a sweep does.

    Raises:
        ConfigInvalid: The message lists every fault.
    """
    flags, faults = spec_layer(given)

    def rules(spec: LoadSpec) -> Iterator[ConfigConflict]:
        yield from _arrival_rules(spec, rate_is_given=rate_is_given)
        yield from _text_rules(spec)
        yield from _other_rules(spec)

    return read_document(
        LoadSpec,
        path,
        os.environ,
        subject=SUBJECT,
        flags=flags,
        defaults=_target_defaults(os.environ),
        rules=rules,
        faults=faults,
    )


def _target_defaults(env: Mapping[str, str]) -> ConfigNode:
    """Returns the target that the other commands talk to, from the same two variables."""
    target = {}
    if url := env.get(URL_VARIABLE):
        target["url"] = ConfigNode(url, URL_VARIABLE, is_text=True)
    if env.get(KEY_VARIABLE):
        reference = {"env": ConfigNode(KEY_VARIABLE, KEY_VARIABLE, is_text=True)}
        target["api_key"] = ConfigNode(reference, KEY_VARIABLE)
    return ConfigNode({"target": ConfigNode(target, URL_VARIABLE)} if target else {}, URL_VARIABLE)


def _arrival_rules(spec: LoadSpec, *, rate_is_given: bool) -> Iterator[ConfigConflict]:
    arrivals = spec.arrivals
    both = ("arrivals.users", "arrivals.rate_per_s")
    if rate_is_given:
        if arrivals.users is not None:
            yield ConfigConflict(
                both[:1], "A sweep is an open loop and chooses its rates itself. Leave --users out; see --start-rate."
            )
        return
    if arrivals.users is not None and arrivals.rate_per_s is not None:
        yield ConfigConflict(
            both,
            "Users who wait for their answers (a closed loop) and a rate that waits for nothing (an open loop) exclude "
            "one another. Keep one.",
        )
    if arrivals.users is None and arrivals.rate_per_s is None and spec.shape.trace is None:
        yield ConfigConflict(
            both,
            "Say how the load arrives: --users 20 for users who each wait for their answer, --rate 5 for sessions per "
            "second, or --trace FORMAT:PATH.",
        )
    if arrivals.process != "gamma" and arrivals.cv != 1.0:
        yield ConfigConflict(
            ("arrivals.cv", "arrivals.process"), f"A {arrivals.process} process has no cv. Choose --process gamma."
        )


def _text_rules(spec: LoadSpec) -> Iterator[ConfigConflict]:
    """Distributions, profiles and JSON are read here already, so that their faults stand in the same list."""
    from maitred.load.play.target import extra_fields
    from maitred.load.workload.arrivals import parse_profile
    from maitred.load.workload.lengths import parse_distribution

    def reading(key: str, read: Callable[[], object]) -> Iterator[ConfigConflict]:
        try:
            read()
        except CallerError as error:
            # The reader may name the setting; the listing does so anyway.
            yield ConfigConflict((key,), error.message.removeprefix(f"{key}: "))

    for section, name in (
        ("shape", "prompt_tokens"),
        ("shape", "output_tokens"),
        ("shape", "turns"),
        ("shape", "think_s"),
        ("clients", "cancel_after_s"),
    ):
        key = f"{section}.{name}"
        text = getattr(getattr(spec, section), name)
        yield from reading(key, lambda text=text, key=key: parse_distribution(text, what=key))  # type: ignore[misc]
    yield from reading("arrivals.profile", lambda: parse_profile(spec.arrivals.profile))
    yield from reading("target.body", lambda: extra_fields(spec.target))


def _other_rules(spec: LoadSpec) -> Iterator[ConfigConflict]:
    shape, bounds = spec.shape, spec.bounds
    if shape.prefixes and not shape.prefix_tokens:
        yield ConfigConflict(("shape.prefixes", "shape.prefix_tokens"), "How long are they? Set --prefix-tokens.")
    if shape.prefix_tokens and not shape.prefixes:
        yield ConfigConflict(("shape.prefix_tokens", "shape.prefixes"), "How many are there? Set --prefixes.")
    if bounds.duration_s is not None and bounds.warmup_s >= bounds.duration_s:
        yield ConfigConflict(
            ("bounds.warmup_s", "bounds.duration_s"),
            f"Nothing would be counted: the run of {bounds.duration_s:g} s is over when the warm-up is.",
        )
    if not spec.target.stream and spec.objectives.tpot_s is not None:
        yield ConfigConflict(
            ("objectives.tpot_s", "target.stream"),
            "Without streaming an answer comes in one piece, so there is no time per token. Use e2e.",
        )
