"""The names under which a gateway decides on its replicas."""

import pytest

from maitred.app.assembly.scaling import name_process
from maitred.core.errors import ConfigInvalid


def test_the_name_of_the_gateway_stays_with_the_folder_and_each_process_has_its_own(tmp_path):
    gateway, owner, former_owner = name_process(tmp_path / "data")
    assert former_owner == ""
    (tmp_path / "data").rename(tmp_path / "moved")
    again, new_owner, former_owner = name_process(tmp_path / "moved")
    assert (again, former_owner) == (gateway, owner)
    assert new_owner != owner


def test_each_folder_has_its_own_name(tmp_path):
    assert name_process(tmp_path / "one")[0] != name_process(tmp_path / "other")[0]


def test_a_file_that_was_cut_off_is_written_again(tmp_path):
    (tmp_path / "gateway.names").touch()
    gateway, _, former_owner = name_process(tmp_path)
    assert former_owner == ""
    assert name_process(tmp_path)[0] == gateway


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "gateway.names").mkdir()
    with pytest.raises(ConfigInvalid, match=r"gateway\.names"):
        name_process(tmp_path)
