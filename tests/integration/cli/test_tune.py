"""`maitred tune` on the bundled model, with little time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from maitred.config.loader import load


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "maitred", "tune", "--threads", "1", "--kv-memory", "64MiB", *arguments]


def test_the_limits_are_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "maitred.yaml"
    file.write_text("# Ours.\nlog:\n  level: warning\nengine:\n  max_sequences: 3  # a guess\n")
    bounds = ["--budget", "6s", "--highest", "4", "--prompt-tokens", "16", "--itl", "20s"]
    files = ["--write", str(file), "--html", str(tmp_path / "report.html"), "--svg", str(tmp_path / "plot.svg")]
    done = subprocess.run(command(*bounds, *files), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "→" in done.stdout
    assert "tokens/s" in done.stdout
    text = file.read_text()
    assert text.startswith("# Ours.\nlog:\n  level: warning\nengine:\n")
    assert "  # a guess\n" in text
    engine = load(file).config.engine
    assert engine.max_sequences in (1, 2, 4)
    assert engine.step_tokens >= engine.max_sequences
    assert engine.itl_objective_s == 20.0
    assert (
        yaml.safe_load(done.stdout[done.stdout.index("engine:") :])["engine"]["max_sequences"] == engine.max_sequences
    )
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_the_budget_holds(tmp_path: Path) -> None:
    """One that is far too short for the sizes still ends in time, with what there is."""
    bounds = ["--budget", "1s", "--highest", "512", "--dry-run", "--itl", "20s"]
    done = subprocess.run(command(*bounds), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1)
    # Its few short samples can also look as if more sequences gave no more tokens.
    assert "--budget" in done.stdout or "more tokens, only longer waits" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "maitred.yaml"
    with subprocess.Popen(
        command("--budget", "60s", "--write", str(file)), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "tokens/s" in line:
                break
        engines = psutil.Process(running.pid).children(recursive=True)
        assert engines
        os.kill(running.pid, signal.SIGINT)
        rest = running.stderr.read()
        assert running.wait(timeout=300) == 130
    assert "Traceback" not in rest
    assert not file.exists()
    assert not any(engine.is_running() for engine in engines)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--itl", "soon"], "--itl must be a time with its unit"),
        (["--budget", "0s"], "--budget 0s"),
        (["--write", "x.yaml", "--dry-run"], "exclude each other"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert text in done.stderr
