"""Compile the kernels of a first forward and backward for sm_90, without a GPU: python -m scripts.prebuild [FOLDER]

FOLDER is kernels/cubins, where the library looks for them and from where wheels take them; elsewhere, they are used
where RINGATTN_CUBINS names it. They are for the installed Triton. What is there already is not compiled again; files
that no problem needs any more are removed.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.prebuild")

import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs

import ringattn
from ringattn.kernels import delta, launch, prebuilt
from ringattn.tools.terminal import Parser, run
from tests import sass, simulated_host

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 256)
HEADS = ((32, 8), (8, 8))
MASKS: tuple[dict[str, Any], ...] = (dict(causal=True), {}, dict(causal=True, documents=1024))
TOKENS = 8192  # of a rank


class Prebuilder:
    """Compiles what is launched on a simulated host."""

    def __init__(self, patch: pytest.MonkeyPatch, place: Path, dry: bool) -> None:
        self.patch, self.place, self.dry, self.names = patch, place, dry, dict[str, str]()
        self.real = launch._compile

    def first_call(self, ranks: int, dtype: torch.dtype, dim: int, heads: tuple[int, int], mask: dict[str, Any]) -> None:
        with self.patch.context() as patch:
            arguments, total = dict(mask), ranks * TOKENS
            if (documents := arguments.pop("documents", 0)):
                arguments["cu_seqlens"] = [*range(0, total, documents), total]
            if ranks > 1:
                arguments["dataflow"] = "gather"
            host = simulated_host.Host(patch, total, ranks=ranks, **arguments)
            patch.setattr(launch, "_compile", self.real)
            patch.setattr(launch, "compile_together", functools.partial(self._compile_together, host))
            q, k, v = (x.detach().to(dtype).requires_grad_() for x in host.tensors(*heads, dim))
            out: Any = ringattn.attention(q, k, v, host.plan, kernel="hopper")
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def _compile_together(self, host: simulated_host.Host, calls: list[Any], device: torch.device) -> list[Any]:
        found = []
        for call in calls:
            (warmup,) = call.args
            kernel = warmup.func.__self__
            with sass.hopper_driver():
                _ = kernel.device_caches[0]
                kernel.compile = self._compile
                warmup()
            found.append(simulated_host._Compiled(host, kernel.__name__))
        return found

    def _compile(self, src: Any, target: Any, options: Any, **more: Any) -> Any:
        name = prebuilt.name_of(src, target, options)
        if name not in self.names:
            self.names[name] = src.name
            if not self.dry and not (self.place / f"{name}.json").exists():
                compiled = triton.compiler.compile(src, target=target, options=options, **more)
                prebuilt.write(self.place, name, compiled)
                print(name, src.name, len(compiled.asm["cubin"]), flush=True)
        return None


def main() -> int:
    parser = Parser("scripts.prebuild", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=prebuilt.FOLDER)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    os.environ[prebuilt.SWITCH] = str(args.folder)
    place = prebuilt.folder()
    place.mkdir(parents=True, exist_ok=True)
    knobs.compilation.disable_line_info = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.prebuilt, "serve", lambda kernel: None)
        all_ = Prebuilder(patch, place, args.dry)
        for ranks, dtype, dim, heads, mask in itertools.product((1, 2), DTYPES, HEAD_DIMS, HEADS, MASKS):
            before = len(all_.names)
            all_.first_call(ranks, dtype, dim, heads, mask)
            print(ranks, dtype, dim, heads, mask, [*all_.names.values()][before:], flush=True)
    print(len(all_.names))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
