"""Triton's compiler makes machine code of every kernel for a GPU, on a machine that has none.

The interpreter, by which the other tests run the kernels, takes more of Python than the compiler does.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.source import ROOT

pytest.importorskip("triton")

COMPILE = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from maitred.engine.kernels.gpu import triton_kernels

capability, kind = int(sys.argv[1]), sys.argv[2]
rows, factor = f"*{kind}", {"fp32": tl.float32, "bf16": tl.bfloat16}[kind]
shape = {"HEAD_DIM": 64, "PADDED_DIM": 64, "SPLIT_TOKENS": 256}
tiled = {"tiles": "*i32", "attended": rows, "sums": "*fp32", "extremes": "*fp32"}
cached = {"keys": rows, "values": rows}
kernels = [
    (
        "rotate_and_store",
        cached | {"qkv": rows, "angles": "*fp32", "positions": "*i64", "slots": "*i64", "qkv_stride": "i32"},
        {"HEADS": 14, "KV_HEADS": 2, "PADDED_HEADS": 16, "PADDED_KV_HEADS": 2, "HEAD_DIM": 64, "PADDED_HALF": 32},
    ),
    *(
        (
            "attend_tile",
            cached | tiled | {"queries": rows, "tables": "*i32"}
            | {"query_stride": "i32", "table_stride": "i32", "scale": "fp32"},
            shape | {"KV_HEADS": 2, "GROUP": 7, "PADDED_ROWS": 16, "BLOCK_TOKENS": 16, "STRIDE_TOKENS": 64}
            | {"SPLITS": splits, "FACTOR": factor, "WINDOW": window, "CAP": cap},
        )
        for splits, window, cap in ((1, 0, 0.0), (4, 0, 0.0), (4, 1000, 50.0))
    ),
    *(("combine", tiled, shape | {"HEADS": 14, "SPLITS": 4, "WINDOW": window}) for window in (0, 1000)),
]
made = []
for name, types, constants in kernels:
    kernel = getattr(triton_kernels, name)
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    made.append([name, len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])])
members = vars(triton_kernels)
print(json.dumps([made, [name for name in members if isinstance(members[name], triton.JITFunction)]]))
"""


@pytest.mark.parametrize(("capability", "kind"), [(80, "bf16"), (90, "fp32")])
def test_every_kernel_compiles(capability, kind, tmp_path):
    # In a process of its own: whether Triton compiles or interprets is decided when it is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(capability), kind]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    made, kernels = json.loads(run.stdout.splitlines()[-1])
    assert all(size > 0 for _, size in made)
    assert {name for name, _ in made} == set(kernels)
