"""The names under which a gateway decides on its replicas."""

import subprocess
import sys

import pytest

from maitred.app.assembly.scaling import name_process
from maitred.core.errors import ConfigInvalid


def test_the_name_of_the_gateway_stays_with_the_folder_and_each_process_has_its_own(tmp_path):
    with name_process(tmp_path / "data") as (gateway, process, former_process):
        assert former_process == ""
    (tmp_path / "data").rename(tmp_path / "moved")
    with name_process(tmp_path / "moved") as (again, new_process, former_process):
        assert (again, former_process) == (gateway, process)
        assert new_process != process


def test_each_folder_has_its_own_name(tmp_path):
    with name_process(tmp_path / "one") as one, name_process(tmp_path / "other") as other:
        assert one[0] != other[0]


def test_gateways_that_run_at_the_same_time_in_one_folder_have_a_name_each_and_keep_it(tmp_path):
    with name_process(tmp_path) as one, name_process(tmp_path) as other, name_process(tmp_path) as third:
        assert len({one[0], other[0], third[0]}) == 3
        assert one[2] == other[2] == third[2] == "", "nobody is taken for gone who runs"
    with name_process(tmp_path) as again:
        assert (again[0], again[2]) == (one[0], one[1])
        with name_process(tmp_path) as second:
            assert (second[0], second[2]) == (other[0], other[1])


def test_the_name_of_a_killed_process_is_free(tmp_path):
    holds = "import sys, pathlib, maitred.app.assembly.scaling as s\nwith s.name_process(pathlib.Path(sys.argv[1])):"
    program = f"{holds}\n  print('held', flush=True)\n  sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        named = (tmp_path / "gateway.names").read_text().split()
        with name_process(tmp_path) as other:
            assert other[0] != named[0]
        process.kill()
    with name_process(tmp_path) as (gateway, _, former_process):
        assert [gateway, former_process] == named


def test_a_file_that_was_cut_off_is_written_again(tmp_path):
    (tmp_path / "gateway.names").touch()
    with name_process(tmp_path) as (gateway, _, former_process):
        assert former_process == ""
    with name_process(tmp_path) as again:
        assert again[0] == gateway


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "gateway.names").mkdir()
    with pytest.raises(ConfigInvalid, match=r"gateway\.names"), name_process(tmp_path):
        pass
