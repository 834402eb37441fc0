"""The gateway runs where torch is not installed."""

import subprocess
import sys

FORBIDDEN = ("torch", "numpy", "numba", "safetensors", "transformers", "starlette")


def test_serving_imports_nothing_of_the_engines():
    code = f"import sys, maitred.app.serve; print([name for name in {FORBIDDEN} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
