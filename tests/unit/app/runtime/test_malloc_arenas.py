"""Arenas of the C library: threads leave no memory behind in arenas of their own."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from maitred.app.runtime import limit_malloc_arenas

if sys.argv[2] == "limited":
    limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
all_there = threading.Barrier(8)

def allocate():
    libc.malloc(1000)
    all_there.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="The C library is not glibc.")
def test_threads_share_one_arena(tmp_path):
    def arenas(how):
        told = tmp_path / how
        subprocess.run([sys.executable, "-c", PROGRAM, str(told), how], check=True)
        return told.read_text().count("<heap ")

    assert arenas("limited") == 1
    assert arenas("as it comes") > 1
