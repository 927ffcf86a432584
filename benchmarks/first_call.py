"""Measure the time to a first result on this machine: the first forward and backward of a process, and the doctor, each
with an empty folder of compiled kernels, with prebuilt ones (scripts/prebuild.py), if there are some, and an empty
folder, and with what the first one has left in it.

python -m benchmarks.first_call                     on one GPU, on two if there are two (gather), and the doctor
python -m benchmarks.first_call --only call --gpus 1 --documents 4096
python -m benchmarks.first_call --only call --gpus 1 --profile       what the host does, by function

"lanes" are seconds since the call began: when each kernel was compiled (the stages of Triton: its IR from Python, LLVM,
ptxas), when gcc made a launcher, and when a module was loaded; what overlaps was done at the same time. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ringattn.tools.terminal import Parser, run, table

ROOT = Path(__file__).resolve().parent.parent


class Lanes:
    """What compiles, and when."""

    def __init__(self) -> None:
        import triton.runtime.build as build
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime import cache

        self.began, self.events, self._inside = time.perf_counter(), list[tuple[str, float, float, str]](), 0
        knobs.compilation.listener = self._compiled  # type: ignore[assignment]
        self._wrap(build, "_build", "gcc")
        self._wrap(CompiledKernel, "_init_handles", "launcher, load")
        self._wrap(cache, "triton_key", "hash of Triton")

    def _wrap(self, owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **options)
            if (ended := time.perf_counter()) - began > 0.002:
                self._add(what, began, ended, str(getattr(args[0], "name", args[0])) if args else "")
            return result

        setattr(owner, name, timed)

    def _compiled(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages = [("ir", times.ir_initialization), *times.lowering_stages]
        ended = time.perf_counter()
        text = " ".join(f"{name} {x / 1e6:.2f}" for name, x in stages)
        began = ended - sum(x for _, x in stages) / 1e6 - times.store_results / 1e6
        self._add("found" if cache_hit else "compile", began, ended, f"{src.fn.fn.__module__}.{src.name}: {text}")

    def _add(self, what: str, began: float, ended: float, text: str) -> None:
        name = threading.current_thread().name
        self.events.append((f"{what} [{name}]", began - self.began, ended - self.began, text))


def call(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the parts of a first call, in this process, which torchrun has started if it has a rank."""
    marks = [("", time.perf_counter() - (time.time() - args.began))]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import torch

    import ringattn

    mark("start, import torch, ringattn")
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    q_heads, kv_heads = args.heads
    shapes = (q_heads, kv_heads, kv_heads)
    q, k, v = (
        torch.randn(1, args.tokens, heads, args.head_dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in shapes
    )
    synchronize()
    if world > 1:
        torch.distributed.barrier()
    mark("GPU, process group, inputs")
    options: dict[str, Any] = dict(causal=True, **({"dataflow": "gather"} if world > 1 else {}))
    total = world * args.tokens
    if args.documents:
        options["cu_seqlens"] = [*range(0, total, args.documents), total]
    group = None if world > 1 else ringattn.virtual.VirtualRank(0, 1, device)
    plan = ringattn.plan(total, group, **options)
    synchronize()
    mark("plan")
    lanes = Lanes()
    mark("import Triton")
    profile = cProfile.Profile()
    for which in ("first", "second"):
        with profile if args.profile and which == "first" else contextlib.nullcontext():
            out: Any = ringattn.attention(q, k, v, plan)
            synchronize()
            mark(f"{which} forward")
            torch.autograd.grad(out.square().sum(), (q, k, v))  # with a gradient of out torch would import sympy
            synchronize()
            mark(f"{which} backward")
    parts = {name: end - start for (_, start), (name, end) in itertools.pairwise(marks)}
    text = io.StringIO()
    if args.profile:
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(80)
    return dict(parts=parts, lanes=sorted(lanes.events, key=lambda event: event[1]), profile=text.getvalue())


def environments(folder: str) -> dict[str, dict[str, str]]:
    """Return the variables of each run, which are started in this order."""
    from ringattn.kernels import prebuilt

    runs = {"cold": {prebuilt.SWITCH: "0", "TRITON_CACHE_DIR": f"{folder}/kernels"}}
    if (reason := prebuilt.problem()) is None:
        runs["prebuilt"] = {"TRITON_CACHE_DIR": f"{folder}/of prebuilt"}
    else:
        print(f"no prebuilt kernels: {reason}")
    return {**runs, "warm": runs["cold"]}


def in_a_process(args: argparse.Namespace, gpus: int, folder: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run :func:`call` on so many GPUs and return what the first rank says."""
    words = [f"--tokens={args.tokens}", f"--head-dim={args.head_dim}", f"--documents={args.documents}"]
    words += [f"--device={args.device}", f"--began={time.time()}", f"--into={folder}/result"]
    words += ["--profile"] * args.profile
    command = ["-m", "benchmarks.first_call", *words, "--heads", *map(str, args.heads)]
    if gpus > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", *command]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env={**os.environ, **variables})
    result: dict[str, Any] = json.loads(Path(folder, "result").read_text())
    return result


def doctor(variables: dict[str, str]) -> list[tuple[float, str]]:
    """Return the lines of the doctor, and when each came."""
    env = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    began, lines = time.perf_counter(), []
    command = [sys.executable, "-m", "ringattn.doctor"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((round(time.perf_counter() - began, 2), line.rstrip()))
            print(f"  {lines[-1][0]:6.1f} s  {lines[-1][1]}", flush=True)
    print(f"  {time.perf_counter() - began:6.1f} s  ended with status {process.returncode}", flush=True)
    return lines


def main() -> int:
    parser = Parser("benchmarks.first_call", __doc__)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs; default: 1, and 2 if there are two")
    parser.add_argument("--only", choices=("call", "doctor"), help="leave out the other one")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--documents", type=int, default=0, help="tokens of each document; 0: one row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this command")
    parser.add_argument("--profile", action="store_true", help="print what the host does in the first call")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)  # when the process was started
    parser.add_argument("--into", help=argparse.SUPPRESS)  # a file: run one call, as one of the processes
    args = parser.parse_args()
    if args.into:
        result = call(args)
        if os.environ.get("RANK", "0") == "0":
            Path(args.into).write_text(json.dumps(result))
        return 0
    import torch

    available = torch.cuda.device_count() if args.device == "cuda" else 2  # leaves the GPUs alone
    if not available:
        parser.error("no GPU is visible; --device cpu tries this command")
    found: dict[str, Any] = {}
    for gpus in () if args.only == "doctor" else args.gpus or range(1, min(available, 2) + 1):
        with tempfile.TemporaryDirectory() as folder:
            results = {x: in_a_process(args, gpus, folder, env) for x, env in environments(folder).items()}
        found[f"{gpus} GPUs"] = results
        print(f"\n{gpus} GPUs, {args.tokens} tokens of each: seconds")
        names = list(results["cold"]["parts"])
        rows = [[name, *(f"{one['parts'][name]:.2f}" for one in results.values())] for name in names]
        both = [
            sum(one["parts"][f"first {way}"] for way in ("forward", "backward")) + one["parts"]["import Triton"]
            for one in results.values()
        ]
        rows.append(["Triton, first forward and backward", *(f"{x:.2f}" for x in both)])
        print(*table(["part", *results], rows), sep="\n")
        for which, one in results.items():
            print(f"lanes, {which}: from, to")
            for what, start, end, text in one["lanes"]:
                print(f"  {start:6.2f} {end:6.2f}  {what}  {text}")
            print(one.pop("profile"))
    if args.only != "call":
        with tempfile.TemporaryDirectory() as folder:
            for which, env in environments(folder).items():
                print(f"\ndoctor, {which}", flush=True)
                found[f"doctor, {which}"] = doctor(env)
    print(json.dumps(dict(python=sys.version.split()[0], cpus=len(os.sched_getaffinity(0)), **found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
