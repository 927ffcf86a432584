"""Merges through mailboxes on a GPU: virtual ranks with a stream each, replays of a graph, and ranks that do not come.

python -m pytest -q tests/test_meet_gpu.py                      one GPU; on several also processes with a GPU each
python -m pytest -q tests/test_decode.py -k mailboxes           all of decode() through mailboxes, one GPU
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_decode import everything
from test_meet import random_states

import ringattn
from ringattn import virtual
from ringattn.generation.decoding import merged
from ringattn.kernels.paged.backends import BACKENDS
from ringattn.peer.watchdog import Board
from ringattn.transport import group as transports
from ringattn.transport.group import Transport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = {  # (batch, new, q_heads, head_dim_v), ranks
    "one row": ((1, 1, 32, 128), 2),
    "a row of states of 256 KiB": ((16, 1, 32, 128), 2),
    "the most that a mailbox takes": ((128, 1, 32, 128), 2),
    "latent": ((3, 1, 128, 512), 3),
    "fewer heads than ranks": ((5, 3, 3, 64), 4),
    "odd sizes": ((3, 7, 5, 70), 3),
}


@pytest.mark.parametrize("heads", ["all", "scattered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_an_all_gather(shape: str, heads: str) -> None:
    """Merges in a row, to which ranks come at different times; states of all ranks differ in every one."""
    (*sizes, dim), ranks = SHAPES[shape]
    sink = torch.randn(sizes[2], device="cuda")
    states = [random_states(ranks, (*sizes, dim), n).cuda() for n in range(4)]

    def body(rank: virtual.VirtualRank) -> None:
        def merge(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            if n % 5 == rank.rank:
                torch.cuda._sleep(200_000)  # cycles
            return merged(states[n % 4][rank.rank], rank, sink, torch.bfloat16, heads, BACKENDS["triton"])

        before = rank.collectives
        got = [merge(n) for n in range(60)]
        assert rank.collectives == before + 60
        mailbox, rank._mailbox = rank._mailbox, lambda: None  # type: ignore[method-assign]
        assert mailbox() is not None
        want = [merge(n) for n in range(4)]
        for n, (out, lse) in enumerate(got):
            assert torch.equal(out, want[n % 4][0]), n
            assert torch.equal(lse, want[n % 4][1]), n

    virtual.run(ranks, body, "cuda", streams=True)


def test_states_that_are_too_large_are_gathered() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        state = torch.zeros(1, device="cuda").expand(129, 1, 32, 130)
        assert rank.mailbox(state) is None
        assert rank.mailbox(state[:1].double()) is None
        assert rank.mailbox(state[:1]) is not None

    virtual.run(2, body, "cuda", streams=True)


STEPS, LENGTH, DIM, HEADS, KV_HEADS = 1000, 2100, 64, 8, 2
one_captures = threading.Lock()


def token_of(step: ringattn.generation.Step, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The attention of two layers, one after the other, to tokens that are functions of their positions."""
    at = step.positions.long()
    out = q[at] * 0
    for layer in range(2):
        out = ringattn.decode(q[at] + out, kv[layer, 0, at], kv[layer, 1, at], step, layer=layer)
    return out


def replays(rank: Transport, together: Callable[[], object]) -> torch.Tensor:
    """Return the output of the last of STEPS replays over this rank, after a comparison with steps without a graph.
    ``together`` returns when all ranks have called it."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(LENGTH, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=g)
    kv = torch.randn(2, 2, LENGTH, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=g)
    options = dict(tokens=20_000, page_size=64, windows=[None, 300], device="cuda")
    captured, plain = (ringattn.KVCache(2, KV_HEADS, DIM, rank, **options) for _ in range(2))
    rows = [0, None, 1, 2]
    for cache in (captured, plain):
        assert [cache.add() for _ in range(3)] == [0, 1, 2]
        for n in range(50):  # sequences of several lengths
            token_of(cache.step([1] if n % 2 else [0, 1]), q, kv)
    captured.reserve([0, 1, 2], 2 * (STEPS + 2), new_tokens=2)
    step = captured.step(rows, 2)
    token_of(step, q, kv)  # compiles, and writes what the first replay writes again
    torch.cuda.current_stream().synchronize()
    together()
    graph = torch.cuda.CUDAGraph()
    with one_captures, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        before = rank.collectives
        out = token_of(step, q, kv)
        step.advance()
        assert rank.collectives == before + 2
    together()
    for n in range(STEPS):
        graph.replay()
        if n % 50 == 49:
            torch.cuda.current_stream().synchronize()
            together()
            if n == 49:
                reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved, "no allocation"
    step.sync()
    assert captured.lengths == {0: 25 + 2 * STEPS, 1: 50 + 2 * STEPS, 2: 2 * STEPS}
    for _ in range(STEPS):
        expected = token_of(plain.step(rows, 2), q, kv)
    assert torch.equal(out, expected)
    assert not out[1].any()
    assert captured.lengths == plain.lengths
    return out.clone()


@pytest.mark.parametrize("world_size", [2, 3])
def test_replays_equal_steps_without_a_graph(world_size: int) -> None:
    """Growing lengths, turns, a window and a padded row; bit for bit."""
    first, *others = virtual.run(world_size, lambda rank: replays(rank, rank._together), "cuda", streams=True)
    assert all(torch.equal(first, other) for other in others)


def on_own_gpu(rank: int, world_size: int, store: str) -> None:
    """Decode and replay in a process with a GPU of its own, and compare the bits of all ranks."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{store}", rank=rank, world_size=world_size)
    transport = transports.of(None)
    results = [*everything(None, torch.float32), replays(transport, dist.barrier)]
    assert transport._mailbox() is not None, "python -m ringattn.doctor says why"
    for x in results:
        mine = x.to(transport.device)
        of_all = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(of_all, mine)
        assert all(torch.equal(mine, other) for other in of_all), "the same bits on every rank"
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_with_a_gpu_each(world_size: int, tmp_path: Path) -> None:
    """Steps are dense attention, and 1,000 replays equal steps without a graph, in each other's memory."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    torch.multiprocessing.spawn(on_own_gpu, (world_size, str(tmp_path / "store")), nprocs=world_size)


def test_two_streams_of_a_rank() -> None:
    """Merges on one stream wait for those on the other."""
    states = [random_states(2, (2, 1, 32, 128), n).cuda() for n in range(40)]

    def body(rank: virtual.VirtualRank) -> list[torch.Tensor]:
        here, other = torch.cuda.current_stream(), torch.cuda.Stream()
        results = []
        for n, state in enumerate(states):
            with torch.cuda.stream(other if n % 2 else here):
                if n % 4 == 1 + 2 * rank.rank:
                    torch.cuda._sleep(200_000)
                results.append(merged(state[rank.rank], rank, None, torch.float32, "all", BACKENDS["triton"])[0])
        here.wait_stream(other)
        return results

    first, second = virtual.run(2, body, "cuda", streams=True)
    for n, (x, y) in enumerate(zip(first, second, strict=True)):
        want = BACKENDS["triton"].finish(states[n], None, torch.float32).out
        assert torch.equal(x, want), n
        assert torch.equal(y, want), n


# ---------------------------------------------------------------- a rank that does not come

RANK = """
import sys, torch
from ringattn.peer import driver, watchdog
from ringattn.peer.mailbox import Mailbox
device = torch.device("cuda", 0)
state = torch.zeros(1, 1, 32, 130, device=device)
board = watchdog.Board.create(sys.argv[1], 0, 2)
board.enter(3.0)
print("here", flush=True)
sys.stdin.readline()  # the other rank has entered
board.device_address = driver.pin(board.address, board.size)
memories = []
def share(size):
    memories[:] = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    return memories[0], [x.data_ptr() for x in memories], memories
mailbox = Mailbox(0, 2, device, share, 3.0, board.pinned(watchdog.MEET))
watchdog.start(board, [1])
torch.cuda.synchronize()
print("merges", flush=True)
for _ in range(int(sys.argv[2])):
    mailbox.merge(state, None, torch.bfloat16, False)
torch.cuda.synchronize()
print("went on", flush=True)
"""


@pytest.mark.parametrize("merges", [1, 20_000], ids=["waits for the GPU", "is blocked in a launch"])
def test_a_rank_that_does_not_come_ends_the_others_with_its_name(merges: int) -> None:
    root = Path(__file__).parents[1]
    folder = tempfile.TemporaryDirectory(dir="/dev/shm")  # where boards are: other files cannot be pinned
    path = f"{folder.name}/board"
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, path, str(merges)], cwd=root, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "here\n"
        board = Board.open(path, 1, 2)
        board.enter(3.0)
        process.stdin.write("\n")
        process.stdin.flush()
        if process.stdout.readline() != "merges\n":
            pytest.fail(process.communicate(timeout=600)[1])
        began = time.monotonic()
        said, error = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGABRT, error
        assert 3.0 < time.monotonic() - began < 3.0 + 30.0  # the first launch compiles
        assert "went on" not in said
        assert f"s for the states of exchange 1: rank 1 (process {os.getpid()}) runs, but has not come" in error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        folder.cleanup()
