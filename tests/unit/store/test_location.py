"""From the configuration to the database's address."""

from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.store.config import StoreConfig
from maitred.store.location import data_folder, database_url, make_folder


def _config(url: str) -> StoreConfig:
    return StoreConfig(url=Secret(url, "{env: STORE_URL}"))


def test_the_folder_is_where_the_desktop_specification_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_folder(StoreConfig()) == tmp_path / "maitred"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder(StoreConfig()) == tmp_path / ".local/share/maitred"
    assert data_folder(StoreConfig(folder="~/here")) == tmp_path / "here"


def test_without_a_url_it_is_sqlite_in_the_folder(tmp_path: Path) -> None:
    url = database_url(StoreConfig(folder=str(tmp_path / "a?b")))
    assert (url.drivername, url.database) == ("sqlite+aiosqlite", str(tmp_path / "a?b" / "maitred.db"))


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_every_spelling_of_postgresql(scheme: str) -> None:
    url = database_url(_config(f"{scheme}://user:p%40ss@host:5433/name?sslmode=require\n"))
    assert url.drivername == "postgresql+asyncpg"
    assert (url.username, url.password, url.host, url.port, url.database) == ("user", "p@ss", "host", 5433, "name")
    assert dict(url.query) == {"ssl": "require"}


@pytest.mark.parametrize(
    "url",
    ["nonsense", "", "mysql://u:hunter2@h/n", "sqlite://", "sqlite:///:memory:", "postgresql://u:hunter2@h:port/n"],
)
def test_an_address_that_cannot_be_used_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"store\.url") as caught:
        database_url(_config(url))
    assert "hunter2" not in caught.value.message


def test_a_folder_that_cannot_be_made_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid, match=r"store\.folder"):
        make_folder(tmp_path / "file" / "data")
