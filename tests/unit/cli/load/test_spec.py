"""How options and a YAML file become one spec, and how all of their faults are reported at once."""

from pathlib import Path
from typing import Any

import pytest
import typer.main

from maitred.cli.load.flags import SPEC_FLAGS
from maitred.cli.load.run import run
from maitred.cli.load.spec import read_spec
from maitred.core.errors import ConfigInvalid
from maitred.load.spec import ArrivalsSpec, LoadSpec, LoadTenant, ObjectivesSpec

OWN = {"spec", "out", "html", "plots", "record"}


def given(*words: str) -> dict[str, Any]:
    """The values of the options, as typer would hand them to `maitred load run`."""
    application = typer.Typer()
    application.command()(run)
    context = typer.main.get_command(application).make_context("run", list(words))
    return {name: value for name, value in context.params.items() if name not in OWN}


def read(*words: str, text: str | None = None, rate_is_given: bool = False) -> LoadSpec:
    path = None
    if text is not None:
        path = Path("load.yaml")
        path.write_text(text)
    return read_spec(path, given(*words), rate_is_given=rate_is_given)


def faults(*words: str, text: str | None = None, rate_is_given: bool = False) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        read(*words, text=text, rate_is_given=rate_is_given)
    count, *listed = caught.value.message.split("\n")
    assert count == f"The load run has {'a fault' if len(listed) == 1 else f'{len(listed)} faults'}:"
    return [line.strip() for line in listed]


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_option_writes_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sesame")
    values = {
        "--url": "http://box:1",
        "--unix-socket": "/run/server.sock",
        "--model": "m",
        "--endpoint": "completions",
        "--api-key-env": "KEY",
        "--tokenizer": "folder",
        "--body": '{"temperature": 0}',
        "--rate": "2.5",
        "--process": "gamma",
        "--cv": "3",
        "--profile": "ramp:from=0,to=2,over=60",
        "--prompt-tokens": "uniform:5..10",
        "--output-tokens": "7",
        "--lengths": "pairs.csv",
        "--turns": "2",
        "--think": "exponential:mean=1",
        "--prefixes": "3",
        "--prefix-tokens": "64",
        "--trace": "mooncake:t.jsonl",
        "--speed": "0.5",
        "--scale": "0.125",
        "--retries": "0",
        "--timeout": "90s",
        "--cancel": "0.1",
        "--stall": "0.2",
        "--max-open": "9",
        "--duration": "2m",
        "--requests": "1000",
        "--warmup": "500ms",
        "--drain": "5s",
        "--attainment": "0.9",
        "--seed": "7",
    }
    assert values.keys() | {"--no-stream", "--users"} == {flag.name for flag in SPEC_FLAGS}
    spec = read(*(word for item in values.items() for word in item))
    for flag in SPEC_FLAGS:
        if flag.name in values and flag.name != "--api-key-env":
            setting: Any = spec
            for part in flag.key.split("."):
                setting = getattr(setting, part)
            expected: Any = {"90s": 90.0, "2m": 120.0, "500ms": 0.5, "5s": 5.0}.get(
                values[flag.name], values[flag.name]
            )
            assert setting == type(setting)(expected), flag.name
    assert spec.target.api_key is not None
    assert (spec.target.api_key.reveal(), spec.target.api_key.reference) == ("sesame", "{env: KEY}")
    assert read("--users", "3").arrivals == ArrivalsSpec(users=3)
    assert read("--users", "3").target.stream is True
    assert read("--users", "3", "--no-stream").target.stream is False


def test_lists_of_options() -> None:
    spec = read(
        *("--users", "1", "--objective", "ttft=1s", "--objective", "tpot=50ms", "--objective", "e2e=2m"),
        *("--tenant", "search=3", "--tenant", "acme.com=0.5", "--set", "arrivals.spread_s=4"),
    )
    assert spec.objectives == ObjectivesSpec(ttft_s=1.0, tpot_s=0.05, e2e_s=120.0)
    assert spec.tenants == {"search": LoadTenant(share=3.0), "acme.com": LoadTenant(share=0.5)}
    assert spec.arrivals.spread_s == 4.0


def test_options_win_over_the_file() -> None:
    text = "arrivals: {rate_per_s: 5, process: constant}\ntenants: {a: {share: 1}, b: {share: 2}}\nseed: 3\n"
    assert read(text=text).arrivals == ArrivalsSpec(rate_per_s=5.0, process="constant")
    spec = read("--seed", "4", "--tenant", "b=9", text=text)
    assert (spec.seed, spec.tenants["a"].share, spec.tenants["b"].share) == (4, 1.0, 9.0)


def test_a_loop_of_one_kind_replaces_one_of_the_other() -> None:
    assert read("--users", "2", text="arrivals: {rate_per_s: 5}").arrivals == ArrivalsSpec(users=2)
    assert read("--rate", "2", text="arrivals: {users: 5}").arrivals == ArrivalsSpec(rate_per_s=2.0)
    assert len(faults("--users", "2", "--rate", "2")) == 1
    assert len(faults(text="arrivals: {users: 5, rate_per_s: 1}")) == 1


def test_all_faults_of_file_and_options_are_reported_at_once() -> None:
    listed = faults(
        *("--timeout", "3 weeks", "--objective", "ttf=1s", "--tenant", "a=0", "--set", "clients.retrys=2"),
        *("--prompt-tokens", "lognormal:mean=-4", "--body", "[1]"),
        text="target: {ulr: x}\narrivals:\n  users: 0\n  profile: hill\n",
    )
    starts = [
        "load.yaml:1: target.ulr: No such setting. Did you mean target.url?",
        "load.yaml:3: arrivals.users: Must be a whole number at least 1, not 0.",
        "--tenant: tenants.a.share: Must be a number above 0, not 0.",
        "--set: clients.retrys: No such setting. Did you mean clients.retries?",
        "--timeout: clients.timeout_s: Must be a duration such as 500ms or 2m, above 0, not 3 weeks.",
        "--objective: objectives.ttf_s: No such setting. Did you mean objectives.ttft_s?",
        "--prompt-tokens: shape.prompt_tokens: ",
        "load.yaml:4: arrivals.profile: ",
        "--body: target.body: ",
    ]
    assert len(listed) == len(starts)
    for line, start in zip(listed, starts, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "Say how the load arrives"),
        (("--users", "1", "--cv", "2"), "--cv: arrivals.cv: A poisson process has no cv."),
        (("--users", "1", "--prefixes", "2"), "--prefixes: shape.prefixes: How long are they?"),
        (("--users", "1", "--prefix-tokens", "2"), "--prefix-tokens: shape.prefix_tokens: How many are there?"),
        (
            ("--users", "1", "--duration", "10s", "--warmup", "10s"),
            "--warmup: bounds.warmup_s: Nothing would be",
        ),
        (
            ("--users", "1", "--no-stream", "--objective", "tpot=1s"),
            "--objective: objectives.tpot_s: Without stream",
        ),
        (("--users", "1", "--api-key-env", "NOT_SET"), "The environment variable NOT_SET is not set."),
    ],
)
def test_what_does_not_fit_together(words: tuple[str, ...], expected: str) -> None:
    (fault,) = faults(*words)
    assert expected in fault


@pytest.mark.parametrize("option", ["--timeout", "--duration", "--warmup", "--drain"])
def test_a_bare_number_is_no_duration(option: str) -> None:
    (fault,) = faults("--users", "1", option, "60")
    assert fault.startswith(option)
    assert fault.endswith("Must be a time with its unit, such as 500ms, 30s or 2m; not '60'.")
    assert read("--users", "1", "--set", "bounds.duration_s=60").bounds.duration_s == 60.0  # the name has the unit
    assert read("--users", "1", "--warmup", "0").bounds.warmup_s == 0.0


def test_a_bare_number_is_no_objective() -> None:
    (fault,) = faults("--users", "1", "--objective", "ttft=1")
    assert fault.startswith("--objective: objectives.ttft_s: Must be a time with its unit")


def test_a_trace_says_itself_how_the_load_arrives() -> None:
    assert read("--trace", "mooncake:t.jsonl").arrivals == ArrivalsSpec()


def test_a_sweep_chooses_its_rates() -> None:
    assert read(rate_is_given=True).arrivals == ArrivalsSpec()
    (fault,) = faults("--users", "2", rate_is_given=True)
    assert "--users: arrivals.users: A sweep is an open loop" in fault


@pytest.mark.parametrize(
    ("word", "text"), [("--objective", "ttft"), ("--tenant", "a"), ("--set", "seed"), ("--tenant", "=3")]
)
def test_a_pair_without_its_half_says_how_to_write_it(word: str, text: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"{word} {text}: write it as {word} [A-Z]+=[A-Z]+"):
        read("--users", "1", word, text)
