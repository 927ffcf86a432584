"""The Triton kernels compile for GPUs on which they have not been run, within the shared memory of these GPUs.

Compiling takes seconds per kernel: bf16 at head dim 128 everywhere; ``RINGATTN_COMPILE_ALL=1`` adds float32 and the
head dims 64, 192/128, 256 and 512. ``python tests/test_triton_targets.py`` prints registers, spills and shared memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import sass
from kernel_contract import causal, make_block
from triton.backends.compiler import GPUTarget

from ringattn.kernels.contract import Keys, Queries, Result, Score
from ringattn.kernels.triton import backward, backward_inputs, backward_large, forward, joining, primitives
from ringattn.kernels.triton.launch_parameters import Passes, Tiles, WideTiles, row_of
from ringattn.partial import Partial

KB = 1024
# The target, its compute capability as `primitives.capability` returns it, bytes of shared memory of a program.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), (8, 0), 163 * KB),
    "sm_89": (GPUTarget("cuda", 89, 32), (8, 9), 99 * KB),
    "sm_100": (GPUTarget("cuda", 100, 32), (10, 0), 227 * KB),
    "sm_120": (GPUTarget("cuda", 120, 32), (12, 0), 99 * KB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), (0, 0), 64 * KB),
}
CAPABILITIES = [(0, 0), (7, 5), (8, 6), (9, 0), (10, 3), (12, 1)]
CASES = [("bfloat16", 128, 128)]
if os.environ.get("RINGATTN_COMPILE_ALL"):
    DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
    CASES = [(dtype, *dims) for dtype in ("bfloat16", "float32") for dims in DIMS] + [("bfloat16", 512, 512)]


def report(name: str, dtype: str, dim: int, dim_v: int) -> dict[str, dict]:
    """Compile the kernels for a target. Returns for each registers, spills and bytes of shared memory."""
    target, capability, _ = TARGETS[name]
    shapes = ((4, dim), (2, dim), (2, dim_v), (4, dim_v))
    q, k, v, dout = (torch.zeros(1, 512, *shape, dtype=getattr(torch, dtype)) for shape in shapes)
    rows, block, score = torch.zeros(1, 4, 512), make_block(*causal(512, 512), 512), Score(dim**-0.5)
    launches: dict[str, dict] = {}

    def compile_it(kernel, grid, *args, **options) -> None:
        if kernel.__name__ != "_base2":
            name = kernel.__name__ if len(args) < 10 or args[8] is not None else "_largest"
            launches[name] = resources(sass.compile_for(target, kernel, grid, args, options))

    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, backward, backward_inputs, backward_large, joining):
            patch.setattr(module, "dispatch", compile_it)
        patch.setattr(primitives, "capability", lambda device: capability)
        forward.forward(q, Keys(k, v, block), score, None, True)
        forward.largest(q, Keys(k, v, block), score)
        out, state = q.new_zeros(dout.shape), Partial(rows, rows, torch.zeros(dout.shape))
        joining.join(state, (out, rows), Result(out, rows), False)
        backward.backward(Queries(q, dout, rows, rows), Keys(k, v, block), score, torch.zeros(q.shape))
    return launches


def resources(compiled) -> dict[str, int]:
    """Return the registers of a thread, the bytes that it spills, and the shared memory of a program."""
    if "amdgcn" in compiled.asm:
        numbers = dict(re.findall(r"\.(\w+):\s+(\d+)", compiled.asm["amdgcn"]))
        registers, spilled = int(numbers["vgpr_count"]), 4 * int(numbers["vgpr_spill_count"])
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [sass.TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, spilled = int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])
    return dict(registers=registers, spilled=spilled, shared=compiled.metadata.shared)


@functools.cache
def reports(name: str) -> dict:
    """Compile in a process of its own, where Triton's interpreter is off."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_fit(name: str) -> None:
    shared = TARGETS[name][2]
    for case, kernels in reports(name).items():
        backwards = ("_weights", "_key_sums", "_query_sums") if " 512" in case else ("_dkdv", "_dq")
        assert set(kernels) == {"_forward", "_join", "_largest", *backwards}
        for kernel, used in kernels.items():
            assert used["shared"] <= shared, f"{name}, {case}, {kernel}: {used}"
            assert used["registers"] > 0


def test_every_call_has_tiles() -> None:
    dims = ((16, 16), (40, 80), (64, 64), (128, 64), (192, 128), (256, 256))
    for capability, dtype, (dim, dim_v) in itertools.product(CAPABILITIES, (torch.bfloat16, torch.float32), dims):
        q, v = (torch.zeros(1, 1, 1, size, dtype=dtype) for size in (dim, dim_v))
        row = row_of(q, v, capability)
        call = (capability, dtype, dim, dim_v)
        assert (row.dim >= max(dim, dim_v), row.dim_v >= dim_v) == (True, True), call
        assert (type(row.forward), type(row.backward)) == (Tiles, Passes), call


def test_large_head_dims_have_wide_tiles() -> None:
    q, v = torch.zeros(1, 1, 1, 320, dtype=torch.float16), torch.zeros(1, 1, 1, 512, dtype=torch.float16)
    for capability in CAPABILITIES:
        tiles = row_of(q, v, capability).backward
        assert isinstance(tiles, WideTiles), capability
        assert tiles.size % tiles.depth == 0, capability


def main(names: list[str]) -> None:
    """Print a line of JSON for one target, a table for several: Triton keeps kernels by device, whatever its target, so
    each target has a process of its own."""
    if len(names) == 1:
        cases = {f"{dtype} {dim}/{dim_v}": report(names[0], dtype, dim, dim_v) for dtype, dim, dim_v in CASES}
        print(json.dumps(cases))
        return
    for name in names or TARGETS:
        for case, kernels in reports(name).items():
            for kernel, used in kernels.items():
                numbers = "  ".join(f"{what} {n}" for what, n in used.items())
                print(f"{name:7s} {case:17s} {kernel:9s} {numbers}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
