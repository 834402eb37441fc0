"""Runs the sections of docs/clients.md: ``python -m scripts.clients [NAME …] [--model FOLDER]``.

Each section has a program, and a comment with the packages that it needs. The packages are installed into an
environment below the user's cache, once, and the program is run as it stands there, but for the address of the server.
A program has to end with the exit code 0, and to print something.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maitred.testing.server_process import serving

PAGE = Path(__file__).parent.parent / "docs" / "clients.md"
BUNDLED = Path(__file__).parent.parent / "src" / "maitred" / "bundled" / "maitred-tiny"
ADDRESS, MODEL = "http://127.0.0.1:8000", "SmolLM2-135M-Instruct"
_SECTION = re.compile(
    r"<!-- client: (?P<about>[^>]*) -->\n```(?P<language>\w+)\n(?P<program>.*?)^```$", re.DOTALL | re.M
)
_FILES = {"python": "program.py", "javascript": "program.mjs", "bash": "program.sh"}
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Client:
    """One section of the page.

    Attributes:
        name: Name of the client.
        language: Language of the program.
        program: The program.
        pip: Python packages that it needs.
        npm: Node packages that it needs.
        needs_tools: Whether the bundled model is too small for it.
    """

    name: str
    language: str
    program: str
    pip: Sequence[str] = ()
    npm: Sequence[str] = ()
    needs_tools: bool = False


def clients() -> list[Client]:
    """Returns the sections of the page that have a program."""
    found = []
    for match in _SECTION.finditer(PAGE.read_text(encoding="utf-8")):
        name, *about = match["about"].split("; ")
        facts = dict(fact.split(": ", 1) for fact in about)
        found.append(
            Client(
                name,
                match["language"],
                match["program"],
                facts.get("pip", "").split(),
                facts.get("npm", "").split(),
                needs_tools=facts.get("needs") == "tools",
            )
        )
    return found


def install(client: Client, folder: Path) -> None:
    """Installs what a client needs into a folder, unless that was done."""
    stamp = folder / "installed"
    needed = " ".join([*client.pip, *client.npm])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == needed:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if client.pip:
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *client.pip], check=True)
    if client.npm:
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, *client.npm], check=True)
    stamp.write_text(needed, encoding="utf-8")


def run(client: Client, folder: Path, address: str, model: Path) -> str:
    """Runs the program of a client against a server.

    Returns:
        What went wrong; empty: nothing.
    """
    with tempfile.TemporaryDirectory(prefix="maitred-client-") as home:
        program = Path(folder if client.npm else home) / _FILES[client.language]
        program.write_text(client.program.replace(ADDRESS, address), encoding="utf-8")
        command = {"python": folder / "bin" / "python", "javascript": "node", "bash": "bash"}[client.language]
        try:
            done = subprocess.run(
                [command, program],
                cwd=home,
                env=_environment(folder, home, model),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"it was not done within {_TIMEOUT_S} s"
    if done.returncode:
        return f"it ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return "" if done.stdout.strip() else "it printed nothing"


def _environment(folder: Path, home: str, model: Path) -> Mapping[str, str]:
    """Returns the environment of a program: a home of its own, and nothing about another server."""
    kept = {name: os.environ[name] for name in ("LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if name in os.environ}
    path = f"{folder / 'bin'}:{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "unused"}
    return {
        **kept,
        **offline,
        "PATH": path,
        "HOME": home,
        "MODEL_FOLDER": str(model),
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the named sections, or all; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.clients", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*(client.name for client in clients()), []])
    parser.add_argument("--model", type=Path, help="folder of a model that knows tools and reads long prompts")
    chosen = parser.parse_args(arguments)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "maitred" / "clients"
    failed = False
    model = chosen.model or BUNDLED
    with serving(str(model), settings={"model.served_name": MODEL}) as server:
        for client in clients():
            if chosen.names and client.name not in chosen.names:
                continue
            if client.needs_tools and chosen.model is None:
                print(f"{client.name:12} not run: it needs --model")
                continue
            install(client, cache / client.name)
            problem = run(client, cache / client.name, server.url, model)
            print(f"{client.name:12} {problem or 'answered'}", flush=True)
            failed = failed or bool(problem)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
