"""A gateway under test, with the client of its operator."""

import asyncio
from contextlib import asynccontextmanager

import httpx


@asynccontextmanager
async def operator_client(server, key, limit_s):
    """Starts a server and ends it, for at most so many seconds between; shows its log if something fails.

    Yields:
        The started server, and a client with the key.
    """
    started = await asyncio.to_thread(server.__enter__)
    try:
        async with (
            asyncio.timeout(limit_s),
            httpx.AsyncClient(
                base_url=started.url, timeout=limit_s, headers={"authorization": f"Bearer {key}"}
            ) as client,
        ):
            yield started, client
    except BaseException:
        print(started.log.read_text())
        raise
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
