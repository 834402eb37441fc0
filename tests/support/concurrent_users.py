"""Many users at once, each asking again as soon as it is answered.

Run as ``python -m tests.support.concurrent_users URL KEY USERS``.
"""

import asyncio
import sys

import aiohttp

SECONDS = 1200
"""They are ended before; this is for those whose starter was killed."""
QUESTION = {
    "model": "maitred-tiny",
    "max_tokens": 150,
    "stream": True,
    "messages": [{"role": "user", "content": "Tell me a story about a small dog and a large cat in the rain."}],
}


async def user(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.post(f"{url}/v1/chat/completions", json=QUESTION) as response:
            await response.read()
        if response.status != 200:
            await asyncio.sleep(0.5)


async def main(url: str, key: str, users: int) -> None:
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections, headers={"authorization": f"Bearer {key}"}) as session:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(user(session, url) for _ in range(users)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
