"""Check this machine, its settings and its arithmetic, with a verdict and advice for each finding.

    python -m ringattn.doctor            # about 20 seconds; needs no GPU. With a GPU 25, or 40
    python -m ringattn.doctor --json     # the same as one JSON object

It reports versions, GPUs and the links between them, environment variables that cost speed or hide faults, limits of
the system, an exchange between two processes over gloo (and between two GPUs over NCCL), and attention over virtual
ranks with every dataflow against float64. The exit status is 1 if a check fails, and 0 if all are "ok" or "warn".
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import __version__, attention, dataflows, json_file, plan, reference, virtual
from ..factory import Plan
from ..kernels import backends, contract
from ..masks.intervals import Mask
from ..peer import driver
from . import kernel_speed
from .terminal import Parser

SECONDS = 10.0  # of the numerical self-test
TIMEOUT = 600.0  # seconds of an exchange between two processes
# Seconds of one of its steps, by backend: on GPUs it may compile kernels. Longer where torch is loaded slowly.
STEP_TIMEOUT = {"gloo": 60.0, "nccl": 180.0}
NVLINK_GBS = 60.0  # of copies between GPUs; PCIe 5.0 x16 moves less
COPIED = 256 * 2**20  # bytes
CONNECTING = "connecting"  # what a process of an exchange says first
DIFFERS = "differs from float64"
WRONG = "results are wrong here: try kernel='eager', and report the output of this command"
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}  # of rounding


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        verdict: "ok", "warn" (works, but costs speed or hides faults) or "fail".
        advice: what to do about it; "" if it is ok.
    """

    check: str
    verdict: str
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def judged(good: bool, otherwise: str, check: str, text: str, advice: str) -> Finding:
    """Return a finding that is ok, or has the verdict ``otherwise`` and the advice."""
    return ok(check, text) if good else Finding(check, otherwise, text, advice)


# --- Versions and devices ------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")[:2])


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield judged(_numbers(python) >= (3, 11), "fail", "Python", python, "use Python 3.11 or newer")
    text = f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    yield judged(_numbers(torch.__version__) >= (2, 11), "fail", "torch", text, "pip install 'torch>=2.11'")
    try:
        import triton

        good = _numbers(triton.__version__) >= (3, 6)
        yield judged(good, "fail", "Triton", triton.__version__, "pip install 'triton>=3.6'")
        from ..kernels import launch_paths, prebuilt

        paths = {"clusters": launch_paths.clusters(), "direct launches": launch_paths.direct()}
        yield ok("launch paths", ", ".join(f"{path}: {'yes' if has else 'no'}" for path, has in paths.items()))
        if (unused := prebuilt.problem()) is not None:
            good, text = prebuilt.misnamed() is None, f"none are used: {unused}"
            yield judged(good, "warn", "prebuilt kernels", text, "they are compiled")
        else:
            place = prebuilt.folder()
            names = [path.stem for path in place.glob("*.json")]
            counts = Counter(name.partition("-")[0] for name in names)
            text = ", ".join(f"{count} of {arch}" for arch, count in counts.items()) + f", in {place}"
            damaged = [why for name in names if (why := prebuilt.damage(place, name))]
            text = f"{damaged[0]}, {len(damaged)} in all" if damaged else text
            yield judged(not damaged, "warn", "prebuilt kernels", text, f"they are compiled: {prebuilt.ADVICE}")
    except ImportError as error:
        needed = torch.cuda.is_available()
        advice = "pip install 'triton>=3.6'; GPUs run the slow eager kernel without it"
        yield judged(not needed, "fail", "Triton", f"missing ({error})", advice)
    yield ok("ringattn", f"{__version__}, NumPy {np.__version__}, {platform.platform()}")


def gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        hidden = Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        advice = "install a torch for CUDA, and check the driver with nvidia-smi"
        yield judged(not hidden, "fail", "GPUs", "none that torch can use; the eager kernel runs on the CPU", advice)
        return
    q = torch.empty(1, 128, 2, 128, dtype=torch.bfloat16, device="cuda")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        text = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {memory}"
        advice = "another process uses this GPU: see nvidia-smi"
        yield judged(free > total / 2, "warn", f"GPU {index}", text, advice)
    chosen = [backends.choose("auto", q, q, q, contract.Score(1.0), backward=backward) for backward in (False, True)]
    names = [next(name for name, backend in backends.BACKENDS.items() if backend is one) for one in chosen]
    advice = "the compiled kernels cannot run here: Triton and a GPU of sm_80 or newer are needed"
    which = " and ".join(dict.fromkeys(names))
    yield judged("eager" not in names, "warn", "kernel", f"{which} for bf16 of head dim 128", advice)
    rates = kernel_speed.measure("auto", q.device, 128, tokens=4096, seconds=1.0)
    text = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items())
    yield ok("kernel speed", f"{which}: {text}, causal, 4096 tokens, heads 32/8 of 128")


def links() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        yield ok("links", "fewer than two GPUs")
        return
    apart = [
        f"{i}-{j}" for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    advice = "keys are sent as messages, which is slower: check nvidia-smi topo -m, IOMMU settings and the container"
    text = "all pairs" if not apart else f"not between GPUs {', '.join(apart)}"
    yield judged(not apart, "warn", "peer access", text, advice)
    advice = "the driver lacks batched memory operations: update it"
    good = driver.available()
    yield judged(good, "warn", "copy engines", "available" if good else "unavailable", advice)
    slow = {f"0-{j}": rate for j in range(1, count) if (rate := _copy_rate(0, j)) < NVLINK_GBS}
    text = f"at least {NVLINK_GBS:.0f} GB/s between GPU 0 and each other GPU"
    if slow:
        text = ", ".join(f"{pair} {rate:.0f} GB/s" for pair, rate in slow.items())
    advice = "these GPUs are not joined by NVLink (nvidia-smi nvlink --status), or another process uses the links"
    yield judged(not slow, "warn", "NVLink", text, advice)


def _copy_rate(source: int, target: int) -> float:
    """Return the GB/s of copies between two GPUs."""
    x = torch.zeros(COPIED, dtype=torch.uint8, device=f"cuda:{source}")
    y = torch.empty_like(x, device=f"cuda:{target}")
    for _ in range(2):  # the first time opens the link
        started = time.perf_counter()
        for _ in range(4):
            y.copy_(x)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
    return 4 * COPIED / (time.perf_counter() - started) / 1e9


# --- Settings and limits -------------------------------------------------------------------------------

# Variable, value that hurts, verdict, reason with advice.
SETTINGS = (
    ("CUDA_LAUNCH_BLOCKING", "1", "warn", "no copy overlaps with a kernel; unset it"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warn", "streams wait for each other; set 32 if two groups run attention"),
    ("NCCL_P2P_DISABLE", "1", "warn", "messages take the way through host memory; unset it"),
    ("NCCL_IB_DISABLE", "1", "warn", "hosts exchange over TCP; unset it if they have InfiniBand or RoCE"),
    ("NCCL_DEBUG", "TRACE", "warn", "logging slows every message; set WARN"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "fail", "a lost rank leaves the others waiting for ever; unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "warn", "the host waits for every message; unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warn", "every buffer is allocated by the driver; unset it"),
    ("TRITON_INTERPRET", "1", "warn", "kernels run in Python; unset it"),
    ("RINGATTN_CHECK", "1", "warn", "all ranks compare every call, which takes time; unset it after debugging"),
    ("RINGATTN_PULLS", "0", "warn", "no copy engines; unset it unless they fail here"),
)
OURS = {
    "RINGATTN_TIMEOUT", "RINGATTN_CHECK", "RINGATTN_PULLS", "RINGATTN_CALIBRATION", "RINGATTN_KERNEL",
    "RINGATTN_CUBINS",
}  # fmt: skip


def settings() -> Iterator[Finding]:
    env = os.environ
    findings = [
        Finding(name, verdict, f"is {value}", why) for name, value, verdict, why in SETTINGS if env.get(name) == value
    ]
    for name in sorted(n for n in env if n.startswith("RINGATTN_") and n not in OURS):
        findings.append(Finding(name, "warn", "is not a variable of ringattn", f"it has no effect; see {sorted(OURS)}"))
    if file := env.get("RINGATTN_CALIBRATION"):
        try:
            json_file.read(Path(file))
        except (OSError, ValueError) as error:
            advice = "default costs are used; unset it, or run python -m benchmarks.calibrate"
            findings.append(Finding("RINGATTN_CALIBRATION", "warn", f"{file} cannot be read: {error}", advice))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "RINGATTN_CUBINS"):
        folder = env.get(name)
        if folder and Path(folder).is_dir() and Path(folder).stat().st_mode & 0o002:
            advice = f"compiled code is loaded from there, so that any user could change it: chmod o-w {folder}"
            findings.append(Finding(name, "fail", f"all users can write to {folder}", advice))
    yield from findings or [ok("settings", "no variable that costs speed or hides faults")]


def limits() -> Iterator[Finding]:
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        advice = "NCCL and data loaders need shared memory: docker run --shm-size=8g, or --ipc=host"
        yield judged(size >= 2**30, "warn", "/dev/shm", f"{size / 2**30:.1f} GiB", advice)
    if sys.platform != "win32":
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = files == resource.RLIM_INFINITY
        text = "unlimited" if unlimited else str(files)
        yield judged(
            unlimited or files >= 1024, "warn", "open files", text, "every rank opens sockets: ulimit -n 65536"
        )
    name = socket.gethostname()
    try:
        text, good = f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}", True
    except OSError as error:
        text, good = f"{name} cannot be resolved ({error})", bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    advice = "gloo needs the address of this host: add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME (one host: lo)"
    yield judged(good, "warn", "host name", text, advice)


# --- An exchange between two processes -----------------------------------------------------------------


def exchange(backend: str) -> Iterator[Finding]:
    if backend == "gloo" or (torch.cuda.is_available() and torch.cuda.device_count() > 1):
        yield _exchanged(backend)


def _exchanged(backend: str) -> Finding:
    check = f"two ranks, {backend}"
    started, limit = time.monotonic(), 0.0  # of a step, which begins when both have loaded torch
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(Path(folder, f"log{rank}"), "w+")) for rank in range(2)]
        command = [sys.executable, "-m", "ringattn.doctor", "--exchange", backend, f"{folder}/store"]
        env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ} if sys.platform == "linux" else dict(os.environ)
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=log, stderr=subprocess.STDOUT, env=env)
            for rank, log in enumerate(logs)
        ]
        try:
            end, deadline, said = started + TIMEOUT, started + TIMEOUT, ["", ""]
            while any(p.poll() is None for p in processes) and time.monotonic() < end:
                if any(p.poll() for p in processes):  # the other one waits for it
                    end = min(end, time.monotonic() + 2.0)
                elif (texts := [Path(log.name).read_text() for log in logs]) != said:
                    said = texts
                    if all(CONNECTING in text for text in said):
                        limit = limit or max(STEP_TIMEOUT[backend], 3 * (time.monotonic() - started))
                        end = min(time.monotonic() + limit, deadline)
                time.sleep(0.05)
            late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [Path(log.name).read_text().strip() for log in logs]
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return ok(check, f"plan, forward and backward agree with one rank, in {time.monotonic() - started:.0f} s")
    rank = next((rank for rank in failed if rank not in late), failed[0])
    if rank in late and (slow := [rank for rank in late if CONNECTING not in texts[rank]]):
        text = f"rank {slow[0]} has not loaded torch in {TIMEOUT:.0f} s, so nothing was exchanged"
        advice = "this machine or its file system is slow: run this command again when it is less busy"
        return Finding(check, "warn", text, advice)
    text = (texts[rank] or "no output").splitlines()[-1][:300]
    advice = "check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), firewalls, and NCCL_DEBUG=WARN"
    if DIFFERS in text:
        advice = WRONG
    how = f"did not end in time, {limit:.0f} s a step; its last line is" if rank in late else "failed:"
    return Finding(check, "fail", f"rank {rank} {how} {text}", advice)


def _as_rank(backend: str, store: str, rank: int) -> int:
    """Compare attention over two processes with one, in one of them; print each step. Returns the exit status."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    print(CONNECTING, flush=True)
    files, wait = dist.FileStore(store, 2), datetime.timedelta(seconds=TIMEOUT)  # the other one may still load torch
    files.set_timeout(wait)
    dist.init_process_group(backend, store=files, rank=rank, world_size=2, timeout=wait)
    dtype = torch.bfloat16 if backend == "nccl" else torch.float32
    mask = plan(257, virtual.VirtualRank(0, 1, device), causal=True).mask
    problem = Problem(mask, 257, dtype, device)
    for dataflow in dataflows():
        print(f"dataflow {dataflow}", flush=True)
        worst = problem.excess(_whole_results(problem, plan(257, causal=True, dataflow=dataflow)))
        if not worst <= 1:
            print(f"dataflow {dataflow} {DIFFERS} by {worst:.1f} times the allowed error", flush=True)
            os._exit(1)
    print("done", flush=True)
    os._exit(0)  # not through the shutdown of the interpreter, in which gloo's threads may abort


# --- Arithmetic ----------------------------------------------------------------------------------------


class Problem:
    """Random inputs of one attention, its results in float64, and the allowed errors: twice those of dense attention in
    ``dtype`` (gradients three times) and one rounding."""

    def __init__(self, mask: Mask, seq_len: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seq_len)
        shapes = dict(q=4, k=2, v=2, dout=4)  # heads
        dim = 64 if dtype == torch.float32 else 128  # with fewer kernels to compile than the other one
        make = lambda heads: torch.randn(1, seq_len, heads, dim, generator=generator).to(device, dtype)  # noqa: E731
        self.inputs = {name: make(heads) for name, heads in shapes.items()}
        self.dtype = dtype
        self.exact = self._dense(lambda q, k, v: reference.attention(q, k, v, mask)[0], torch.float64)
        hidden = ~mask.dense().to(device)[:, None]
        own = self._dense(functools.partial(_in_own_dtype, hidden=hidden), dtype)
        self.allowed = [
            factor * error + UNIT[dtype] for factor, error in zip((2, 3, 3, 3), self._errors(own), strict=True)
        ]

    def _dense(self, attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [self.inputs[name].to(dtype).requires_grad_() for name in ("q", "k", "v")]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.inputs["dout"].to(out.dtype))]

    def _errors(self, results: list[Tensor]) -> list[float]:
        pairs = zip(results, self.exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    def excess(self, results: list[Tensor]) -> float:
        """Return the largest relative rms error of out, dq, dk and dv, in units of the allowed one."""
        worst = [error / bound for error, bound in zip(self._errors(results), self.allowed, strict=True)]
        return float(torch.tensor(worst).max())  # NaN if one is


def _in_own_dtype(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor) -> Tensor:
    """Return dense attention with products in the dtype of the inputs and the softmax in float32."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float() * q.shape[-1] ** -0.5
    p = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(q.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def _whole_results(problem: Problem, plan_: Plan) -> list[Tensor]:
    """Return out, dq, dk and dv of the whole sequence, on every rank."""
    q, k, v = (plan_.shard(problem.inputs[name]).requires_grad_() for name in ("q", "k", "v"))
    out: Any = attention(q, k, v, plan_)
    grads = torch.autograd.grad(out, (q, k, v), plan_.shard(problem.inputs["dout"]))
    return [plan_.unshard(x.detach()) for x in (out, *grads)]


def arithmetic(seconds: float) -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masks: list[dict[str, Any]] = [dict(causal=True), dict(causal=True, cu_seqlens=[0, 1, 130, 257]), {}]
    cases = itertools.product((4, 2), masks, (torch.bfloat16, torch.float32))  # first one of each dtype, in any case
    end, count, worst, where = time.monotonic() + seconds, 0, 0.0, ""
    for case, (size, options, dtype) in enumerate(cases):
        if case > 1 and time.monotonic() > end:
            break
        mask = plan(257, virtual.VirtualRank(0, 1, device), **options).mask
        problem = Problem(mask, 257, dtype, device)
        for dataflow in dataflows():
            arguments = dict(options, dataflow=dataflow)
            over_ranks = lambda rank: _whole_results(problem, plan(257, rank, **arguments))  # noqa: B023, E731
            excess = problem.excess(virtual.run(size, over_ranks, device)[0])
            count += 1
            if not excess <= worst:  # also NaN
                worst, where = excess, f"{size} ranks, {arguments}, {str(dtype).removeprefix('torch.')}"
    text = f"{count} cases of {', '.join(dataflows())}; largest error {worst:.2f} of the allowed one ({where})"
    yield judged(worst <= 1, "fail", "arithmetic", text, WRONG)


# --- The command ---------------------------------------------------------------------------------------

Check = Callable[[], Iterator[Finding]]


def all_checks(seconds: float) -> Iterator[Check]:
    """Yield all checks. Exchanges go on in other processes meanwhile, over NCCL when the GPUs have been timed."""
    gloo = begun(functools.partial(exchange, "gloo"))
    yield from (versions, gpus, links)
    nccl = begun(functools.partial(exchange, "nccl"))
    yield from (settings, limits, functools.partial(arithmetic, seconds), gloo, nccl)


def begun(check: Check) -> Check:
    """Begin a check in a thread, and return one that waits for its findings."""
    pool = ThreadPoolExecutor(1)
    findings = pool.submit(lambda: list(check()))
    pool.shutdown(wait=False)
    return functools.wraps(getattr(check, "func", check))(lambda: iter(findings.result()))


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of checks. A check that raises is a finding that failed."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            text = f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:300]}"
            name = getattr(check, "func", check).__name__  # type: ignore[attr-defined]
            yield Finding(name, "fail", text, "this check could not run; report the output of this command")


def main(argv: list[str] | None = None, name: str = "ringattn.doctor") -> int:
    parser = Parser(name, __doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the comparison with float64")
    parser.add_argument("--exchange", nargs=3, help=argparse.SUPPRESS)  # one of the two processes
    args = parser.parse_args(argv)
    if args.exchange:
        backend, store, rank = args.exchange
        return _as_rank(backend, store, int(rank))
    findings = []
    if not args.json:
        compiles = torch.cuda.is_available()
        print("about 25 seconds; 40 if kernels are compiled" if compiles else "about 20 seconds", flush=True)
    for finding in examine(all_checks(args.seconds)):
        findings.append(finding)
        if not args.json:
            print(f"{finding.verdict:4}  {finding.check:20}  {finding.text}", flush=True)
            if finding.advice:
                print(f"      {'':20}  -> {finding.advice}", flush=True)
    order = ("ok", "warn", "fail")
    verdict = max((finding.verdict for finding in findings), key=order.index)
    if args.json:
        print(json.dumps({"verdict": verdict, "checks": [asdict(finding) for finding in findings]}, indent=1))
    else:
        counts = ", ".join(f"{sum(f.verdict == name for f in findings)} {name}" for name in order)
        print(f"\nverdict: {verdict} ({counts})")
    return int(verdict == "fail")
