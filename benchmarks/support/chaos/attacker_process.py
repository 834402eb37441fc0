"""Process of the attackers, beside that of the victim, so that what they compute delays none of the victim's clients.

It has a lower priority, too: a real attacker brings a machine of his own, and takes none of the server's processors.
One line on its standard input begins an attack, an empty one ends it; then it prints what came of it as one line of
JSON.
"""

import asyncio
import json
import os
import sys

import uvloop

from benchmarks.support.chaos.attack_cases import ATTACKS, bomb, large_requests
from benchmarks.support.chaos.attacker import Attacker

NICENESS = 10


class AttackerProcess:
    """Process of the attackers, as the benchmark sees it.

    Args:
        url: Of the server.
        stranger: Key of the attacker of another organisation.
        neighbour: Key of the attacker of another team of the victim's.
    """

    def __init__(self, url: str, stranger: str, neighbour: str) -> None:
        self._arguments = (url, stranger, neighbour)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "AttackerProcess":
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._line()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def begin(self, attack: str) -> None:
        """Begins an attack of `attack_cases.ATTACKS`."""
        self._write(attack)

    async def end(self) -> dict[str, int]:
        """Ends it, and returns what came of it: how many answers of each status, and the like."""
        self._write("")
        counts: dict[str, int] = json.loads(await self._line())
        return counts

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("The process of the attackers has ended.")
        return line


async def attack_as_told(url: str, stranger: str, neighbour: str) -> None:
    """Attacks as the lines on standard input say, until there are no more."""
    known = {attack.name: attack for attack in ATTACKS}
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    while name := (await lines.readline()).decode().strip():
        attack = known[name]
        attacker = Attacker(url, neighbour if attack.neighbour else stranger)
        attacking = asyncio.ensure_future(attack.run(attacker))
        await lines.readline()
        if not attacking.cancel():
            attacking.result()  # an attack ends by itself only when it fails
        await asyncio.wait([attacking])
        print(json.dumps(attacker.counts), flush=True)


if __name__ == "__main__":
    large_requests(), bomb()  # made before anything is measured
    os.nice(NICENESS)
    uvloop.run(attack_as_told(*sys.argv[1:]))
