"""A data folder and a journal of an earlier version: this one opens them and settles what was under way."""

import shutil
from pathlib import Path

from maitred.store.config import StoreConfig
from tests.integration.accounts.test_ledger import opened, stored
from tests.support.stores import DEADLINE_S

EARLIER = Path(__file__).parents[2] / "data" / "earlier_version"
"""Requests 0 to 2 are in the database, 3 to 7 are journaled, and 8 was running when its process was killed."""


async def test_a_journal_of_an_earlier_version_is_settled_once(tmp_path):
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    config = StoreConfig(folder=str(tmp_path / "data"), deadline_s=DEADLINE_S)
    async with opened(config, tmp_path / "journal") as (database, ledger):
        await ledger.replay()
        assert await ledger.replay() == 0
        rows = await stored(database)
    assert [(row["id"], row["outcome"]) for row in rows][:8] == [(f"u-{number:06d}", "finished") for number in range(8)]
    assert [row["cost_nusd"] for row in rows][:8] == [1_000 + number for number in range(8)]
    assert [(row["id"], row["outcome"]) for row in rows][8:] == [("u-000008", "failed")]
    assert list((tmp_path / "journal").glob("*/*.segment")) == []
