"""`maitred load` as a user starts it, against a real `maitred serve`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.testing.server_process import ServerProcess, free_port, serving

SMALL = ("--prompt-tokens", "30", "--output-tokens", "8", "--set", "arrivals.spread_s=0")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(settings={"engine.kv_memory_bytes": "64MiB"}) as server:
        yield server


def start(*words: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "maitred", "load", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def load(*words: str, folder: Path) -> tuple[int, str, str]:
    return finish(start(*words, folder=folder))


def test_users_get_their_answers_and_the_run_can_be_replayed(server: ServerProcess, tmp_path: Path) -> None:
    # An odd number: the end of the run cuts a session.
    code, out, err = load(
        *("run", "--url", server.url, "--users", "3", "--requests", "11", "--turns", "2", *SMALL),
        *("--out", "runs/a", "--record", "runs/a.trace", "--objective", "e2e=1m"),
        folder=tmp_path,
    )
    assert code == 0, err
    assert "Time to first token" in out
    result = LoadResult.load(tmp_path / "runs/a.json")
    assert result.summary.outcomes == {UserOutcome.COMPLETE: 11}
    assert set(result.requests.output_tokens) == {8}
    assert result.command.startswith("maitred load run --url")
    assert result.target.model == "maitred-tiny"
    assert "<svg" in (tmp_path / "runs/a.html").read_text()

    code, _, err = load(
        *("run", "--url", server.url, "--trace", "recorded:runs/a.trace", "--speed", "2", "--no-html", "--out", "b"),
        folder=tmp_path,
    )
    assert code == 0, err
    replayed = LoadResult.load(tmp_path / "b.json")
    assert sorted(replayed.requests.asked_tokens) == sorted(result.requests.asked_tokens)
    assert set(replayed.requests.session) == set(result.requests.session)


def test_ctrl_c_still_gives_a_report(server: ServerProcess, tmp_path: Path) -> None:
    process = start(
        *("run", "--url", server.url, "--users", "2", "--duration", "10m", "--out", "a", "--no-html", *SMALL),
        folder=tmp_path,
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:  # the second line is progress: the run is under way
        seen.append(line)
        if " due, " in line:
            break
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 0, seen
    assert "No new requests." in err
    result = LoadResult.load(tmp_path / "a.json")
    assert set(result.summary.outcomes) == {UserOutcome.COMPLETE}
    assert result.seconds < 60


def test_ctrl_c_twice_ends_at_once(server: ServerProcess, tmp_path: Path) -> None:
    process = start(
        *("run", "--url", server.url, "--users", "2", "--duration", "10m", "--out", "a", "--no-html"),
        *("--output-tokens", "1500", "--prompt-tokens", "30"),
        folder=tmp_path,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " due, " in line:
            process.send_signal(signal.SIGINT)
        if line.startswith("No new requests."):
            break
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert (code, out) == (130, "")
    assert not (tmp_path / "a.json").exists()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = load("run", "--url", url, "--users", "1", folder=tmp_path)
    assert (code, out) == (1, "")
    assert url in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_finds_that_the_highest_rate_allowed_still_passes(server: ServerProcess, tmp_path: Path) -> None:
    code, out, err = load(
        *("sweep", "--url", server.url, "--highest", "1", "--trial", "4s", *SMALL, "--no-html", "--out", "knee"),
        folder=tmp_path,
    )
    assert code == 0, err
    assert "1.00 sessions/s passes" in err
    assert "Highest rate that holds" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["knee.json", "knee.md"]
