"""Stage faults on this machine: ranks that are killed, stopped, or raise an error in the middle of attention.

    python -m scripts.check_faults                  # two GPUs: gather by copy engines at 20 points, ring by NCCL at 5,
                                                    # decoding by mailboxes at 4, the first token at 4
    python -m scripts.check_faults --device cpu     # the same over gloo, every dataflow
    python -m scripts.check_faults --points 3 --faults kill stop

No torchrun: this script starts the ranks itself, as srun would, so that no launcher ends the others when one fails. The
ranks train in a loop; at one point of the forward or backward of the fourth step the last rank is

* killed (SIGKILL),
* stopped (SIGSTOP), as by a debugger, a frozen container or a host that swaps,
* made to raise MemoryError; at every second point it catches its own error and stays alive.

Points are the places before and after every signal, wait and message of one forward and backward, or of one token. A
case passes if every other rank ends by itself, with an exit status that is not 0 and a text that names its own rank,
the faulty rank and the step or the call; if it ends within 5 s (10 s after a stop and where the faulty rank stays
alive, because the time limit is 5 s; on the CPU 10 s more); and if no process is left. The first cases have no fault
and must end well. Cases run next to each other; those of two H200s take about four minutes. The last line is JSON; the
exit status is 0 only if all cases pass.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.check_faults")

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringattn.tools.terminal import Parser
from scripts.arguments import positive

MARK = "RINGATTN_FAULT_CASE"  # an environment variable that marks the processes of a case
TIMEOUT = 5.0  # seconds that a rank waits for another
MARGIN = {"cuda": 5.0, "cpu": 15.0}  # seconds until it has ended; a small host with many ranks is slow
START = 300.0  # seconds until the fault must have been staged; the first case compiles kernels
PATIENT = 120.0  # the time limit of the first steps, in which one rank may be far ahead
STEPS = 4  # of a run without a fault


@dataclass(frozen=True)
class Case:
    """One fault: what happens to the last rank, at which of the points, ``at`` from 0 to 1."""

    dataflow: str
    fault: str
    at: float
    device: str
    ranks: int
    stays: bool = False  # after an error


# ------------------------------------------------------------------ a rank


class Points:
    """Counts the points of a step, and stages the fault at one of them."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.faulty = case, rank == case.ranks - 1
        self.names: list[str] = []
        self.target = -1

    def reach(self, name: str) -> None:
        self.names.append(name)
        if not self.faulty or len(self.names) - 1 != self.target:
            return
        print(json.dumps(dict(fault=time.monotonic(), point=name, number=self.target)), flush=True)
        if self.case.fault == "exception":
            raise MemoryError("staged")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.case.fault])

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.reach(f"before {name}")
            result = function(*args)
            self.reach(f"after {name}")
            return result

        return call

    def instrument(self, transport: Any) -> None:
        """Set points around all that a rank signals, waits for, sends and receives."""
        from ringattn.peer.pull import Pull

        start = self.around("start", transport.start)

        def start_and_wait(*args: Any) -> Any:
            pending = start(*args)
            wait = self.around("wait", pending.wait)
            return type("Pending", (), {"wait": staticmethod(wait)})()

        transport.start = start_and_wait
        if link := getattr(transport, "_link", None):
            link.signal, link.wait_for = self.around("signal", link.signal), self.around("wait", link.wait_for)
            release = Pull.release
            around: Any = self.around("release", release)
            Pull.release = lambda pull, wave: around(pull, wave)  # type: ignore[assignment,method-assign,misc]
            if self.case.dataflow == "first token":  # which makes the mailboxes
                link.share = self.around("share", link.share)
                return
            mailbox = link.mailbox()
            mailbox.merge = self.around("merge", mailbox.merge)


def work(case: Case) -> None:
    """Run one rank: train until the fault of another rank ends this process."""
    import torch
    import torch.distributed as dist

    import ringattn

    rank = int(os.environ["RANK"])
    gpu = case.device == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    tokens, dim, dtype = (4096, 128, torch.bfloat16) if gpu else (64, 16, torch.float32)
    decodes = case.dataflow in ("decode", "first token")
    flow = "gather" if decodes else case.dataflow
    plan = ringattn.plan(tokens * case.ranks, causal=True, dataflow=flow, timeout=PATIENT)
    if gpu and flow == "gather" and not plan.transport.pulls:
        raise SystemExit("copy engines are not in use")
    points = Points(case, rank)
    points.instrument(plan.transport)
    heads = (8, 2, 2)
    q, k, v = (torch.randn(1, tokens, h, dim, device=case.device, dtype=dtype, requires_grad=True) for h in heads)
    cache = ringattn.KVCache(1, 2, dim, tokens=tokens, dtype=dtype)
    sequence = cache.add()

    def train(plan: ringattn.Plan) -> None:
        points.reach("before forward")
        out: Any = ringattn.attention(q, k, v, plan)
        points.reach("after forward")
        loss = out.float().square().sum()
        loss.backward()
        points.reach("after backward")
        loss.item()  # as a training script does

    def generate(plan: ringattn.Plan) -> None:
        plan.transport.limit = plan.timeout or PATIENT
        token = cache.step([sequence])
        points.reach("before decode")
        with torch.no_grad():
            out: Any = ringattn.decode(q[:, :1], k[:, :1], v[:, :1], token, layer=0)
        points.reach("after decode")
        out.float().sum().item()
        cache.crop(sequence, 0)

    def step(plan: ringattn.Plan) -> None:
        points.names.clear()
        with contextlib.suppress(MemoryError) if case.stays else contextlib.nullcontext():
            (generate if decodes else train)(plan)
            return
        time.sleep(600)

    first = case.dataflow == "first token"
    for _ in range(0 if first else 2):
        step(plan)
    quick = ringattn.plan(tokens * case.ranks, causal=True, dataflow=flow, timeout=TIMEOUT)
    if first:  # before and after decode(), and before and after memory is shared in it
        points.target = round(case.at * 3)
        while True:
            step(quick)
    step(quick)
    if gpu:
        torch.cuda.synchronize()
    dist.barrier()
    if case.fault == "none":
        for _ in range(STEPS):
            step(quick)
        dist.destroy_process_group()
        return
    points.target = round(case.at * (len(points.names) - 1))
    while True:
        step(quick)


# ------------------------------------------------------------------ all ranks of a case


@dataclass
class Survivor:
    """The end of a rank without a fault: exit status (None: it hung), seconds after the fault, and its error output."""

    rank: int
    status: int | None
    seconds: float
    stderr: str


def run(case: Case) -> dict[str, Any]:
    """Run a case in its own processes, again if another program took its port. Returns its line of the table."""
    for _ in range(5):
        result = _run(case)
        if not any("EADDRINUSE" in line for line in result["said"]):
            break
    return result


def _run(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        token = f"{os.getpid()}-{port}"
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks), MARK: token,
            "RINGATTN_TIMEOUT": str(PATIENT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_ADDR2LINE": "1",
        }  # fmt: skip
        files = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(case.ranks)]
        processes = []
        for rank, (out, err) in enumerate(files):
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __spec__.name, "--worker", json.dumps(asdict(case))],
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                    )
                )
        try:
            return _observe(case, processes, files, token)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for number in _left(token):
                os.kill(number, signal.SIGKILL)


def _observe(
    case: Case, processes: list[subprocess.Popen[bytes]], files: list[tuple[Path, Path]], token: str
) -> dict[str, Any]:
    fault: dict[str, Any] | None = None
    ended: dict[int, float] = {}
    others = range(case.ranks if case.fault == "none" else case.ranks - 1)
    give_up = time.monotonic() + START
    while len(ended) < len(others) and time.monotonic() < give_up:
        time.sleep(0.05)
        for rank in others:
            if rank not in ended and processes[rank].poll() is not None:
                ended[rank] = time.monotonic()
        line = files[-1][0].read_text()
        if fault is None and line.endswith("\n"):
            fault = json.loads(line)
            give_up = time.monotonic() + TIMEOUT + 3 * MARGIN[case.device]
    survivors = []
    for rank in others:
        seconds = ended.get(rank, time.monotonic()) - (fault["fault"] if fault else 0.0)
        status = processes[rank].returncode if rank in ended else None
        survivors.append(Survivor(rank, status, seconds, files[rank][1].read_text()))
    processes[-1].kill()
    processes[-1].wait()
    give_up = time.monotonic() + 3.0
    while (left := _left(token)) and time.monotonic() < give_up:
        time.sleep(0.1)
    return _judge(case, fault, survivors, left, files[-1][1].read_text())


def _judge(
    case: Case, fault: dict[str, Any] | None, survivors: list[Survivor], left: list[int], last: str
) -> dict[str, Any]:
    """Return the line of a case: what was staged, how the others ended, and what is wrong with that."""
    wrong = [f"{len(left)} processes are left"] if left else []
    limit = MARGIN[case.device] + (TIMEOUT if case.fault == "stop" or case.stays else 0.0)
    texts = []
    for survivor in survivors:
        name = f"rank {survivor.rank}"
        errors = [line for line in survivor.stderr.splitlines() if re.search(r"ringattn[:.].*rank", line)]
        texts.append(errors[-1] if errors else _last_line(survivor.stderr))
        if case.fault == "none":
            wrong += [f"{name} ended with status {survivor.status}"] * (survivor.status != 0)
            continue
        if survivor.status is None:
            wrong.append(f"{name} hangs")
        elif survivor.status == 0:
            wrong.append(f"{name} ended as if nothing had happened")
        elif survivor.seconds > limit:
            wrong.append(f"{name} ended after {survivor.seconds:.1f} s")
        for word in (name, f"rank {case.ranks - 1}", "step|exchange|decode"):
            if survivor.status and not re.search(word, texts[-1]):
                wrong.append(f"{name} does not name {word}")
    if fault is None and case.fault != "none":
        wrong.append(f"the fault was not staged: {_last_line(last)}")
    return dict(
        dataflow=case.dataflow,
        fault=case.fault + ", stays alive" * case.stays,
        point=f"{fault['number']} {fault['point']}" if fault else "",
        seconds=round(max(s.seconds for s in survivors), 2) if fault else None,
        status=[s.status for s in survivors],
        left=len(left),
        said=texts,
        wrong=wrong,
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1][:300]


def _left(token: str) -> list[int]:
    """Return the processes of a case that still exist."""
    result = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    result.append(int(folder.name))
    return result


def cases(device: str, ranks: int, points: int, faults: list[str]) -> Iterator[Case]:
    """Yield all cases. Errors of every second point are caught."""
    flows = {"gather": points, "ring": max(2, points // 4), "decode": 4}  # points of decode: before, after, both inside
    more = {"first token": 4} if device == "cuda" else {"reduce": flows["ring"]}
    for dataflow, count in (flows | more).items():
        for fault in faults:
            for i in range(count):
                stays = fault == "exception" and i % 2 == 1
                yield Case(dataflow, fault, i / max(1, count - 1), device, ranks, stays)


def main() -> int:
    import torch

    parser = Parser("scripts.check_faults", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=positive, default=0, help="default: 2 GPUs, or 3 processes on the CPU")
    parser.add_argument("--points", type=positive, default=20, help="of a gather; other dataflows get a quarter")
    parser.add_argument("--faults", nargs="+", choices=["kill", "stop", "exception"])
    parser.add_argument(
        "--together", type=positive, help="cases at a time; default: so many that ranks have 2 cores each"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Case(**json.loads(options.worker)))
        return 0
    began = time.monotonic()
    ranks = options.ranks or (2 if options.device == "cuda" else 3)
    if options.device == "cuda" and torch.cuda.device_count() < ranks:
        raise SystemExit(
            f"{ranks} ranks need {ranks} GPUs, this host has {torch.cuda.device_count()}; try --device cpu"
        )
    lines = []

    def show(line: dict[str, Any]) -> None:
        lines.append(line)
        seconds = "" if line["seconds"] is None else f"{line['seconds']:.1f} s"
        verdict = "; ".join(line["wrong"]) or "ok"
        name = f"{line['dataflow']:11} {line['fault']:24} {line['point']:24} {seconds:>7}"
        print(f"{name} status {line['status']}  {verdict}", flush=True)
        if line["said"] and line["fault"] != "none":
            print(f"        {line['said'][0][:220]}", flush=True)

    for dataflow in ("gather", "ring", "decode"):  # also compiles the kernels
        show(run(Case(dataflow, "none", 0.0, options.device, ranks)))
    faults = options.faults or ["kill", "stop", "exception"]
    together = options.together or max(1, (os.cpu_count() or 1) // (2 * ranks))
    with ThreadPoolExecutor(together) as pool:
        for line in pool.map(run, cases(options.device, ranks, options.points, faults)):
            show(line)
    failed = [line for line in lines if line["wrong"]]
    slowest = {
        fault: max((line["seconds"] or 0.0 for line in lines if line["fault"].startswith(fault)), default=0.0)
        for fault in faults
    }
    summary = dict(
        device=options.device, ranks=ranks, cases=len(lines), passed=len(lines) - len(failed), slowest_seconds=slowest,
        minutes=round((time.monotonic() - began) / 60, 1), failed=failed,
    )  # fmt: skip
    print(json.dumps(summary))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
