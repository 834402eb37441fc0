"""Whether another process has ended."""

import os
import subprocess
import sys

from maitred.core.parent_watch import is_exiting


def test_a_process_exits_from_its_death_on():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_exiting(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has died, and nobody has taken note
        assert is_exiting(child.pid)
    assert is_exiting(child.pid)


def test_a_name_may_have_parentheses_and_spaces(tmp_path):
    program = tmp_path / "a ) b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_exiting(child.pid)
        child.kill()
