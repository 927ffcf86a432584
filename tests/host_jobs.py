"""What the ranks of simulated hosts run (tests/hosts.py), started by torchrun: python tests/host_jobs.py FOLDER JOB...

Each job writes what one rank has to say to FOLDER/JOB-RANK.json. Jobs run one after another in the same processes.

python tests/host_jobs.py FOLDER train ARGUMENTS... is scripts.train, but for :func:`train`.
"""

from __future__ import annotations

import datetime
import json
import operator
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
from cases import Case
from hosts import ROOT, Traffic, traffic_here
from torch.distributed.device_mesh import init_device_mesh

import ringattn
from ringattn.shape import Shape
from ringattn.transport import health
from scripts import checkpoint, ranks
from scripts import train as training

GUARD = 600.0  # seconds after which a rank hangs
LIMITS = {"cut": 30.0, "killed": 10 * GUARD}  # seconds that a rank waits for another where this fault is staged
LARGE = Case(seq_len=384, batch=1, q_heads=2, kv_heads=2, head_dim=128, head_dim_v=128)
MASKS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "documents": dict(causal=True, cu_seqlens=(0, 130, 200, 384), layout="contiguous"),
}


def every_case(world_size: int) -> dict[str, Case]:
    """Return every dataflow with every mask. The double ones have a group on each host; "flat" is a gather that does
    not know of hosts."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    every: dict[str, Case] = {}
    for name in (*cases.DATAFLOWS, "flat", "deterministic"):
        groups = local if name.startswith("double") and 1 < local < world_size else None
        groups = world_size if name == "flat" else groups
        flow = "gather" if name in ("flat", "deterministic") else name.removeprefix("double-")
        for mask, fields in MASKS.items():
            base = replace(LARGE, dataflow=flow, local_size=groups, deterministic=name == "deterministic")
            every[f"{name}-{mask}"] = replace(base, **fields)
    return every


def sent_elsewhere(plan: ringattn.Plan, case: Case, hosts: list[str]) -> int:
    """Return the bytes that the ranks of this host send to other hosts in a forward and backward, as the plan predicts.

    Args:
        hosts: of each rank.
    """
    size = torch.empty(0, dtype=case.dtype).element_size()
    shape = Shape(case.batch, case.q_heads, case.kv_heads, case.head_dim, case.head_dim_v, size)
    total = 0
    for rank in (rank for rank, host in enumerate(hosts) if host == hosts[plan.rank]):
        for backward in (False, True):
            sent = plan.flow.traffic_bytes(plan, shape, backward, rank)
            total += sum(count for count, host in zip(sent, hosts, strict=True) if host != hosts[rank])
    return total


# --- Jobs ----------------------------------------------------------------------------------------------


def counted(call: Callable[[], Any]) -> tuple[Any, Traffic]:
    """Return ``call()``, and what this host has sent meanwhile, with that of two barriers."""

    def quiet() -> Traffic:
        dist.barrier()
        time.sleep(0.03)  # acknowledgements
        return traffic_here()

    before = quiet()
    dist.barrier()
    result = call()
    return result, quiet() - before


def attention(folder: Path) -> dict[str, Any]:
    """Forward and backward of every dataflow: errors, and bytes that this host has sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts = ranks.gather(socket.gethostname())
    report: dict[str, Any] = dict(host=hosts[rank], number=health.host(), cases={})
    dense = {name: cases.expected(replace(LARGE, **fields)) for name, fields in MASKS.items()}
    for name, case in every_case(world_size).items():
        plan = case.plan()
        predicted = sent_elsewhere(plan, case, hosts)
        report["cases"][name] = attended(case, plan, dense[name.rpartition("-")[2]], predicted)
    return report


def attended(case: Case, plan: ringattn.Plan, dense: cases.Results, predicted: int) -> dict[str, float]:
    """Attend several times. Return the largest error, and the least bytes that this host has sent for it: agents of
    torchrun send kilobytes every few seconds, and a lost packet is sent again."""
    cases.attend(case, plan=plan)  # ranks compare their arguments in the first call
    sent, nothing, payload = [], [], operator.attrgetter("payload")
    for _ in range(100):
        part, traffic = counted(lambda: cases.attend(case, plan=plan))
        sent.append(traffic)
        nothing.append(counted(lambda: None)[1])
        least = min(sent, key=payload) - min(nothing, key=payload)
        if all(ranks.gather(least.payload < max(1.005 * predicted, 2000))):
            break
    want = {}
    for key, whole in dense.items():
        places = plan.positions_k if key in ("dk", "dv") else plan.positions
        want[key] = whole.index_select(2 if key == "lse" else 1, places)
    error = max(cases.errors(part.results, want).values())
    return dict(error=error, sent=least.sent_bytes, payload=least.payload, predicted=predicted)


def mesh(folder: Path) -> dict[str, Any]:
    """As many sequences as hosts, over the mesh of docs/how-to/clusters.md, and with its axes in the other order."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    sizes = (1, dist.get_world_size() // local, local, 1)
    page = (ROOT / "docs" / "how-to" / "clusters.md").read_text()
    names: dict[str, Any] = dict(ringattn=ringattn, device="cpu", sizes=sizes, seq_len=LARGE.seq_len)
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    case = replace(LARGE, causal=True)
    dense = cases.expected(case)
    report = attended(case, names["plan"], dense, 0)
    other = init_device_mesh("cpu", (sizes[2], sizes[1]), mesh_dim_names=("cp", "dp"))
    plan = ringattn.plan(LARGE.seq_len, other["cp"], causal=True)
    hosts = ranks.gather(socket.gethostname(), other["cp"].get_group())
    predicted = local * sent_elsewhere(plan, case, hosts)  # a group for each of the host's ranks
    return dict(other_order=attended(case, plan, dense, predicted)["payload"], **report)


def until_it_fails(folder: Path, job: str) -> dict[str, Any]:
    """Attend in a loop, on a group of all ranks, until another rank is lost. The first rank writes when it begins."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=10 * GUARD))
    case = replace(
        LARGE, seq_len=64, head_dim=8, head_dim_v=8, causal=True, dataflow="gather" if job == "cut" else "ring"
    )
    plan = ringattn.plan(64, group, causal=True, dataflow=case.dataflow, timeout=LIMITS[job])
    cases.attend(case, plan=plan)
    (folder / f"{job}-{dist.get_rank()}.begun").touch()
    began = time.monotonic()
    try:
        while time.monotonic() < began + GUARD:
            cases.attend(case, plan=plan)
    except ringattn.errors.ExchangeFailed as error:
        return dict(error=type(error).__name__, text=str(error))
    return dict(error="", text="no fault came")


def cut(folder: Path) -> dict[str, Any]:
    """The cable of a host is unplugged. The ranks of all hosts wait until it is mended."""
    return until_it_fails(folder, "cut")


def killed(folder: Path) -> dict[str, Any]:
    """All processes of a host are killed."""
    return until_it_fails(folder, "killed")


def train(folder: Path, arguments: list[str]) -> int:
    """Train. After the checkpoint of step N the last rank writes FOLDER/at-N, and goes on when there is no
    FOLDER/stop-N, or SIGTERM has come: a fault comes at this step, however fast the machine is. The others wait for it
    in the next step."""
    save = checkpoint.save

    def and_wait(root: Path, step: int, *more: Any) -> Path:
        path = save(root, step, *more)
        if dist.get_rank() == dist.get_world_size() - 1:
            (folder / f"at-{step}").touch()
            termination: Any = signal.getsignal(signal.SIGTERM)  # a method of scripts.checkpoint.Termination
            while (folder / f"stop-{step}").exists() and not termination.__self__.received:
                time.sleep(0.02)
        return path

    checkpoint.save = and_wait  # type: ignore[assignment]
    return training.main(arguments)


def main(folder: Path, jobs: list[str]) -> int:
    if jobs[0] == "train":
        return train(folder, jobs[1:])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    ranks.join("cpu")
    for job in jobs:
        report = {"attention": attention, "mesh": mesh, "cut": cut, "killed": killed}[job](folder)
        path = folder / f"{job}-{dist.get_rank()}.json"
        path.with_suffix(".part").write_text(json.dumps(report))
        path.with_suffix(".part").rename(path)
        if job == "killed" and dist.get_rank() == 0:
            survivors = range(dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"]))
            end = time.monotonic() + GUARD  # the store of the group is in this process, and other ranks still read it
            while time.monotonic() < end and not all((folder / f"{job}-{rank}.json").exists() for rank in survivors):
                time.sleep(0.02)
        end = time.monotonic() + GUARD
        while time.monotonic() < end and job == "cut" and not (folder / "mended").exists():
            time.sleep(0.02)
    return 0


if __name__ == "__main__":
    ranks.end(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
