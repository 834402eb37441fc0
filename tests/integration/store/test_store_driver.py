"""Connections of SQLite are broken for sure, whatever becomes of those who should close them."""

import asyncio

from sqlalchemy.engine import URL

from maitred.store.driver import make_breaker, make_engine

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
LIMIT_S = 300.0


async def test_a_statement_is_broken_off_after_the_closing_of_its_connection_was_given_up(tmp_path):
    engine = make_engine(URL.create("sqlite+aiosqlite", database=str(tmp_path / "maitred.db")), 5.0)
    connection = await engine.connect()
    driver = (await connection.get_raw_connection()).driver_connection
    breaks = make_breaker(driver)
    asking = asyncio.create_task(driver.execute(ENDLESS))
    await asyncio.sleep(0.1)
    asking.cancel()
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0)
    closing.cancel()  # aiosqlite believes from here on that there is no connection
    async with asyncio.timeout(LIMIT_S):
        while True:
            if not breaks():
                break
            await asyncio.sleep(0.05)
        await asyncio.wait([asking, closing])
        await asyncio.to_thread(driver._thread.join)
    assert asking.cancelled()
    await connection.invalidate()
    await engine.dispose()
