"""Compile the kernels of first forwards and backwards on sm_90, without a GPU: python -m scripts.prebuild [FOLDER]

FOLDER is kernels/cubins, where the library looks for them and from where wheels take them; elsewhere, they are used
where RINGATTN_CUBINS names it. They are for the installed Triton. What is there already is not compiled again; files
that no first call needs any more are removed.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.prebuild")

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs

import ringattn
from ringattn import operators
from ringattn.kernels import backends, delta, launch, prebuilt
from ringattn.kernels.contract import Keys, Outputs, Queries, Score
from ringattn.kernels.triton import primitives
from ringattn.kernels.triton.rounding import sum_parts
from ringattn.tools import doctor, kernel_speed
from ringattn.tools.terminal import Parser, run
from ringattn.virtual import VirtualRank
from tests import sass, simulated_host

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 256)
# Of queries and of keys: kernels are compiled for groups of one and of more, and for no other number of heads.
HEADS = ((32, 8), (8, 8))
MASKS: tuple[dict[str, Any], ...] = (dict(causal=True), {}, dict(causal=True, documents=1024))
TOKENS = (8192, 1024)  # of a rank; few of them are divided in another way


class Compiler:
    """Compiles in the place of launches, and writes what is compiled into a folder."""

    def __init__(self, place: Path) -> None:
        self.place, self.names = place, set[str]()

    def host(self, patch: pytest.MonkeyPatch, tokens: int, ranks: int = 1, **arguments: Any) -> simulated_host.Host:
        """Return a rank of a simulated host with Hopper GPUs. What it launches is compiled and then does nothing."""
        real = launch._compile
        host = simulated_host.Host(patch, tokens, ranks=ranks, **arguments)
        patch.setattr(launch, "_compile", real)
        patch.setattr(launch, "compile_together", functools.partial(self._together, host))
        patch.setattr(prebuilt, "serve", lambda kernel: None)
        patch.setattr(delta, "_compiled", lambda x, dtype: dtype == torch.float32)
        patch.setattr(primitives, "capability", lambda device: (9, 0))
        patch.setattr(operators, "choose", _choose)
        patch.setattr(backends, "choose", _choose)
        return host

    def _together(self, host: simulated_host.Host, calls: list[Any], device: torch.device) -> list[Any]:
        kernels = [call.args[0].func.__self__ for call in calls]
        for kernel, call in zip(kernels, calls, strict=True):
            with sass.hopper_driver():
                _ = kernel.device_caches[0]  # made when it is looked up, with kernel.compile
                kernel.compile = self._compile
                call.args[0]()
        return [simulated_host._Compiled(host, kernel.__name__) for kernel in kernels]

    def _compile(self, src: Any, target: Any, options: Any, **more: Any) -> None:
        name = prebuilt.name_of(src, target, options)
        if name not in self.names and not (self.place / f"{name}.json").exists():
            prebuilt.write(self.place, name, triton.compiler.compile(src, target=target, options=options, **more))
        self.names.add(name)


def _choose(kernel: str, q: torch.Tensor, *others: Any, backward: bool = False) -> backends.Backend:
    """As backends.choose() on a Hopper GPU."""
    return backends.BACKENDS["triton" if q.dtype == torch.float32 else "hopper"]


def attention(dtype: torch.dtype, dim: int, compiler: Compiler) -> None:
    """Run first forwards and backwards of a head dim: of one rank, over ranks whose GPUs share memory, in a ring."""
    for ranks, heads, mask, tokens in itertools.product((1, 2), HEADS, MASKS, TOKENS):
        first_call(compiler, dtype, dim, ranks, heads, mask, tokens)


def first_call(
    compiler: Compiler, dtype: torch.dtype, dim: int, ranks: int, heads: tuple[int, int], mask: dict[str, Any],
    tokens: int, batch: int = 1,
) -> None:  # fmt: skip
    """Run one forward and backward of a rank, whose values are those of uninitialized memory."""
    arguments, total = dict(mask), ranks * tokens
    if documents := arguments.pop("documents", 0):
        arguments["cu_seqlens"] = [*range(0, total, documents), total]
    with pytest.MonkeyPatch.context() as patch:
        host = compiler.host(patch, total, ranks, **arguments, dataflow="gather" if ranks > 1 else "auto")
        q, k, v = (
            torch.empty(batch, tokens, n, dim, dtype=dtype, requires_grad=True) for n in (heads[0], heads[1], heads[1])
        )
        out: Any = ringattn.attention(q, k, v, host.plan)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        if ranks == 1 and mask == MASKS[0] and dtype == torch.bfloat16:
            _ring(q.detach(), k.detach(), v.detach(), tokens)


def _ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int) -> None:
    """Run the steps of a rank in a ring: with its own keys and with those of another rank."""
    plan = ringattn.plan(2 * tokens, VirtualRank(1, 2), causal=True, dataflow="ring")
    kernels, score = backends.BACKENDS["hopper"], Score(q.shape[-1] ** -0.5)
    chunks = [Keys(k, v, plan.block(1, owner)) for owner in (1, 0)]
    out, lse = kernels.output(q, chunks[1], score, kernels.forward(q, chunks[0], score))
    outputs: Outputs | None = Outputs(out)
    for keys in chunks:
        queries, dq = Queries(q, out, lse, torch.empty_like(lse)), torch.empty(q.shape)
        sum_parts([x[None] for x in kernels.backward(queries, keys, score, dq, outputs=outputs)], [k, v])
        outputs = None


def doctor_checks(compiler: Compiler) -> None:
    """Run what the doctor does on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        compiler.host(patch, 256)
        kernel_speed.measure("auto", torch.device("cpu"), 128, tokens=4096, seconds=0.0)
        list(doctor.arithmetic(60.0))


def compiled(case: Callable[[Compiler], None], place: Path) -> set[str]:
    """Compile for a case what is not in a folder; return the names of its files."""
    knobs.compilation.disable_line_info = True  # half of a cubin
    compiler = Compiler(place)
    case(compiler)
    return compiler.names


def main() -> int:
    parser = Parser("scripts.prebuild", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=prebuilt.FOLDER)
    args = parser.parse_args()
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder} is a file; pass a folder, which need not exist")
    os.environ[prebuilt.SWITCH] = str(args.folder.resolve())
    place = prebuilt.folder()
    place.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Callable[[Compiler], None]] = {"doctor": doctor_checks}
    for dtype, dim in itertools.product(DTYPES, HEAD_DIMS):
        cases[f"{str(dtype).removeprefix('torch.')}, head dim {dim}"] = functools.partial(attention, dtype, dim)
    names: set[str] = set()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        outcomes = pool.map(compiled, cases.values(), itertools.repeat(place))
        for case, found in zip(cases, outcomes, strict=False):
            names |= found
            print(f"{case}: {len(found)} kernels", flush=True)
    for file in place.iterdir():
        if file.stem not in names:
            file.unlink()
    size = sum(file.stat().st_size for file in place.iterdir())
    print(f"{len(names)} kernels, {size / 1e6:.1f} MB, in {place}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
