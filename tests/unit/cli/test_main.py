"""The command as a whole: quick to start, errors as sentences, flags as the top layer of the configuration."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from typer.testing import CliRunner, Result

from maitred import __version__
from maitred.cli import local_engine
from maitred.cli.app import app
from maitred.cli.group import PANELS
from maitred.config.loader import LoadedConfig
from maitred.config.tree import BUNDLED_MODEL
from maitred.core.errors import Bug
from maitred.core.flow import PriorityClass, ServiceWeights
from maitred.core.secret import Secret
from maitred.engine.config import EngineConfig
from maitred.fleet.local import engine_command
from maitred.observe.config import LogConfig
from maitred.observe.logs import JsonFormatter
from maitred.wire.link.config import LinkConfig


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """An engine sets the logging of its process up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "TERM": "dumb", **(env or {})})


def test_version() -> None:
    assert run("--version").output == f"maitred {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        (),
        *(
            ("serve",),
            ("chat",),
            ("complete",),
            ("models",),
            ("engine",),
            ("tune",),
            ("config", "show"),
            ("config", "check"),
        ),
        *(("load", verb) for verb in ("run", "sweep", "compare", "chaos", "report")),
        *(("tenants", verb) for verb in ("list", "create", "show", "update", "delete")),
        *(("keys", verb) for verb in ("list", "create", "rotate", "revoke")),
        *(("limits", verb) for verb in ("list", "set", "delete", "budgets")),
        ("usage",),
    ],
)
def test_help_has_examples(command: tuple[str, ...]) -> None:
    for word in ("--help", "-h"):
        result = run(*command, word)
        assert result.exit_code == 0
        assert "Examples:" in result.output
        assert re.search(rf"maitred {' '.join(command)}", result.output)


def test_help_is_in_panels_with_a_line_for_each_command() -> None:
    lines = run("--help").output.splitlines()
    titles = [line.strip("╭╮─ ") for line in lines if line.startswith("╭")]
    assert titles == ["Options", *PANELS]
    names = [line.split()[1] for line in lines[lines.index("╰" + "─" * 98 + "╯") :] if line.startswith("│ ")]
    assert set(names) == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]
    assert len(names) == len(set(names))  # nothing is continued on a second line


def test_help_of_serve_is_in_panels() -> None:
    lines = run("serve", "--help").output.splitlines()
    titles = [line.strip("╭╮─ ") for line in lines if line.startswith("╭")]
    assert titles == ["Arguments", "Options", "Model and engines", "Address and access", "Computation", "Configuration"]


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["config", "show"], ["load", "run", "-h"], ["keys", "create", "-h"]]
)
def test_start_up_imports_nothing_heavy(arguments: list[str]) -> None:
    probe = (
        "import sys; from maitred.cli.main import main\n"
        f"sys.argv = ['maitred', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'tokenizers', 'aiohttp', 'uvicorn', 'jinja2'}\n"
        "print('heavy:', sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr == "heavy: []\n"


def test_serve_hands_its_flags_to_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[LoadedConfig] = []
    gateway = ModuleType("maitred.app.start")
    gateway.run = lambda loaded, read: given.append(loaded) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.app.start", gateway)
    flags = "--host ::1 --port 0 --served-name tiny --device cpu --dtype fp32 --threads 2 --kv-memory 64MiB"
    more = "--max-sequences 4 --log-level debug --set engine.step_tokens=99 --set server.port=5"
    result = run("serve", str(BUNDLED_MODEL), *flags.split(), *more.split())
    assert (result.exit_code, result.output) == (3, "")
    (loaded,) = given
    assert (loaded.config.server.host, loaded.config.server.port) == ("::1", 0)
    assert (loaded.config.model.path, loaded.config.model.served_name) == (str(BUNDLED_MODEL), "tiny")
    assert loaded.config.engine == EngineConfig(
        device="cpu", dtype="fp32", threads=2, kv_memory_bytes=64 << 20, max_sequences=4, step_tokens=99
    )
    assert loaded.config.log.level == "debug"
    assert (loaded.origins["server.port"], loaded.origins["engine.step_tokens"]) == ("--port", "--set")


def test_the_toy_is_served_in_place_of_any_default(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[LoadedConfig] = []
    gateway = ModuleType("maitred.app.start")
    gateway.run = lambda loaded, read: given.append(loaded) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.app.start", gateway)
    assert run("serve", "--tiny", env={"MAITRED_TINY": ""}).output == ""
    assert (given[0].config.model.path, given[0].origins["model.path"]) == (str(BUNDLED_MODEL), "--tiny")
    result = run("serve", "--tiny", "./mine")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Leave one out" in result.stderr


def test_all_wrong_flags_are_named_in_one_run() -> None:
    result = run("serve", "--port", "http", "--device", "tpu", "--threads", "-1", "--set", "engine.thread=1")
    assert result.exit_code == 2
    assert "The configuration has 4 faults:" in result.stderr
    for flag in ("--port: server.port", "--device: engine.device", "--threads: engine.threads", "--set: engine.thread"):
        assert f"  {flag}: " in result.stderr
    assert result.stdout == ""


def test_permission_to_serve_other_machines_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = ModuleType("maitred.app.start")
    gateway.run = lambda loaded, read: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.app.start", gateway)
    assert run("serve", "--host", "0.0.0.0", "--allow-unauthenticated").exit_code == 0


def test_set_without_value_says_how() -> None:
    result = run("config", "show", "--set", "server.port")
    assert result.exit_code == 2
    assert "--set section.setting=value" in result.stderr


@pytest.mark.parametrize("command", [["serve"], ["engine", "--listen", "unix:/tmp/e.sock"]])
def test_a_model_that_is_not_there_is_not_downloaded(command: list[str]) -> None:
    result = run(*command, "Qwen/Qwen2.5-0.5B")
    assert result.exit_code == 2
    assert "There is no folder Qwen/Qwen2.5-0.5B" in result.stderr


def test_engine_runs_the_bundled_model_with_its_own_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Path, EngineConfig, str, ServiceWeights, LinkConfig, str | None]] = []
    process = ModuleType("maitred.engine.process")
    process.serve = lambda *arguments: given.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.engine.process", process)
    flags = ("--listen", "tcp:127.0.0.1:9", "--threads", "3", "--set", "region=eu")
    result = run("engine", "", *flags, env={"MAITRED__SERVER__HOST": "0.0.0.0"})
    assert result.exit_code == 0, result.output
    assert given == [(BUNDLED_MODEL, EngineConfig(threads=3), "tcp:127.0.0.1:9", ServiceWeights(), LinkConfig(), "eu")]


def test_engine_checks_its_address_before_it_loads_anything() -> None:
    result = run("engine", "--listen", "9000")
    assert result.exit_code == 2
    assert "'9000' is not an engine address" in result.stderr


def test_engine_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what an import finds where torch is not installed
    for name in [name for name in sys.modules if name.startswith("maitred.engine.")]:
        if name != "maitred.engine.config":
            monkeypatch.delitem(sys.modules, name)
    result = run("engine", "--listen", "unix:/tmp/e.sock")
    assert result.exit_code == 1
    assert result.stderr == "The engine needs torch, which is not installed. Run: pip install 'maitred[engine]'\n"


def test_config_check() -> None:
    assert run("config", "check").output == "OK\n"
    Path("other.yaml").write_text("server:\n  prot: 1\n")
    result = run("config", "check", "other.yaml")
    assert result.exit_code == 2
    assert result.stderr == (
        "The configuration has a fault:\n  other.yaml:2: server.prot: No such setting. Did you mean server.port?\n"
    )


def test_config_show_says_where_values_came_from() -> None:
    Path("maitred.yaml").write_text("server:\n  port: 81\n")
    result = run("config", "show", "--origin", env={"MAITRED__LOG__LEVEL": "debug"})
    assert re.search(r"port: 81 +# maitred\.yaml:2\n", result.output)
    assert re.search(r"level: debug +# MAITRED__LOG__LEVEL\n", result.output)
    assert "#" not in run("config", "show").output


def test_a_bug_keeps_its_exit_code_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = ModuleType("maitred.app.start")

    def fail(loaded: LoadedConfig, read: Callable[[], LoadedConfig]) -> int:
        raise Bug("It broke.")

    gateway.run = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.app.start", gateway)
    result = run("serve")
    assert (result.exit_code, result.stderr) == (1, "It broke.\n")


def test_an_engine_runs_with_what_a_gateway_passes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with settings that no flag can write, whatever the file and the environment say to a second reader."""
    passed = EngineConfig(max_sequences=3, itl_objective_s=0.05, batching_window_s={PriorityClass.BATCH: 0.2})
    weights = ServiceWeights(prompt=1.0, cached=0.5, output=3.0)
    log = LogConfig(level="error", format="text", burst=3)
    command = engine_command(BUNDLED_MODEL, passed, weights, log)("tcp:127.0.0.1:9")
    served = []
    process = ModuleType("maitred.engine.process")
    process.serve = lambda *arguments: served.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.engine.process", process)
    Path("maitred.yaml").write_text("engine: [broken")
    monkeypatch.setenv("MAITRED__ENGINE__MAX_SEQUENCES", "9")
    assert command[:3] == [sys.executable, "-m", local_engine.__name__]
    assert local_engine.main(command[3:]) == 0
    assert served == [(BUNDLED_MODEL, passed, "tcp:127.0.0.1:9", weights, None, None)]
    root = logging.getLogger()
    assert root.level == logging.ERROR
    assert isinstance(root.handlers[0].formatter, JsonFormatter), "the gateway reads it"


def test_an_engine_of_its_own_counts_tokens_as_the_gateways_queue_does(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    process = ModuleType("maitred.engine.process")
    process.serve = lambda *arguments: served.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.engine.process", process)
    Path("maitred.yaml").write_text("dispatch: {service: {output: 7}}")
    result = run("engine", "--listen", "tcp:127.0.0.1:9")
    assert result.exit_code == 0, result.output
    assert [weights for *_, weights, _, _ in served] == [ServiceWeights(output=7.0)]


def test_a_separate_engine_gets_the_secret_and_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[object, ...]] = []
    process = ModuleType("maitred.engine.process")
    process.serve = lambda *arguments: served.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maitred.engine.process", process)
    Path("secret").write_text("a secret of many characters\n")
    flags = "--secret-file secret --cert-file a.pem --key-file a.key --ca-file ca.pem"
    result = run("engine", "--listen", "tcp:0.0.0.0:9", *flags.split())
    assert result.exit_code == 0, result.output
    link = served[0][-2]
    assert isinstance(link, LinkConfig)
    assert (link.certificate_file, link.key_file, link.ca_file) == ("a.pem", "a.key", "ca.pem")
    assert link.secret == Secret("a secret of many characters", "{file: secret}")


def test_an_engine_is_passed_nothing_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    passed = '{"engine": {"threads": -1}, "service": [], "log": {}}'
    assert local_engine.main([str(BUNDLED_MODEL), "tcp:127.0.0.1:9", passed]) == 2
    assert "threads" in capsys.readouterr().err


def test_an_engine_does_not_wait_for_a_command_line_to_be_put_together() -> None:
    probe = "import sys, maitred.cli.local_engine; print(*{'typer', 'rich', 'yaml', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
