"""The exchange of partial states through mailboxes: its sums, its protocol in any order of execution, and GPUs.

Without a GPU the kernel runs in Triton's interpreter, in halves: what a rank sends, and what it does when all flags of
the others are up. The simulated GPUs (simulated_gpus.py) execute these halves, which use real memory, in random orders.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from simulated_gpus import Deadlock, Shared, Stream, World, _Torch, alias, reached
from suite import few

from ringattn.kernels.contract import Result
from ringattn.kernels.launch import dispatch
from ringattn.kernels.paged import eager, finish, meet
from ringattn.kernels.paged.meet import FLAG, PROGRAMS, RECEIVE, SEND, Mailboxes
from ringattn.kernels.paged.operands import part
from ringattn.kernels.triton.primitives import INTERPRETED
from ringattn.peer import link as memory
from ringattn.peer import mailbox as mailboxes
from ringattn.peer.mailbox import Mailbox
from ringattn.peer.watchdog import MEET, Board, Watch
from ringattn.virtual import VirtualRank

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    not INTERPRETED.value, reason="needs Triton's interpreter, which there is without GPUs"
)


def random_states(world_size: int, shape: tuple[int, int, int, int], seed: int = 0) -> Tensor:
    """Return the states of all ranks, (world_size, batch, new, heads, head_dim_v + 2) float32. Some rows see nothing on
    one rank, and the first one nothing on any."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(world_size, *shape[:3], shape[3] + 2, generator=g)
    states[..., -1] = states[..., -1].exp()
    empty = torch.rand(states.shape[:-1], generator=g) < 0.2
    empty[:, 0, 0, 0] = True
    states[empty] = 0.0
    states[..., -2][empty] = float("-inf")
    return states


def own_mailboxes(world_size: int) -> tuple[list[Mailboxes], list[Tensor]]:
    """Return what the kernels of every rank get, and the memory of the mailboxes."""
    memory = [torch.zeros(meet.mailbox_bytes(world_size) // 4, dtype=torch.int32) for _ in range(world_size)]
    addresses = torch.tensor([x.data_ptr() for x in memory])
    counts = [torch.zeros(PROGRAMS.value, dtype=torch.int32) for _ in range(world_size)]
    return [Mailboxes(addresses, counts[rank], rank, 0, 0, 0) for rank in range(world_size)], memory


def merged(states: Tensor, of_rank: list[Mailboxes], sink: Tensor | None, scattered: bool) -> list[Result]:
    """Merge the states of all ranks, half by half; return the result of every rank."""
    results = [meet.empty_result(x, m, torch.float32, scattered) for x, m in zip(states, of_rank, strict=True)]
    for step in (SEND.value, RECEIVE.value):
        for x, m, result in zip(states, of_rank, results, strict=True):
            meet.launch(x, m, sink, result, scattered, step)
    return results


@interpreted
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("world_size", "shape", "programs"),
    [(2, (2, 3, 6, 8), 128), (3, (1, 1, 5, 128), 2), (5, (1, 2, 4, 20), 3)],
    ids=["one tile", "rows in turns", "fewer heads than ranks"],
)
def test_the_sum_is_that_of_float64_and_the_bits_those_of_finish(
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    shape: tuple[int, int, int, int],
    programs: int,
    scattered: bool,
) -> None:
    monkeypatch.setattr(meet, "_LEAST", 128)  # numbers of a tile: several programs for a few rows
    monkeypatch.setattr(meet, "PROGRAMS", tl.constexpr(programs))
    heads = shape[2]
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(1))
    of_rank, _ = own_mailboxes(world_size)
    for n in range(2):
        states = random_states(world_size, shape, n)
        want = eager.finish(states.double(), sink, torch.float64)
        positive = torch.cat([states[..., :-2].abs(), states[..., -2:]], -1)
        size = eager.finish(positive.double(), sink, torch.float64)[0]  # of the sums without cancellation
        same = finish.finish(states, sink, torch.float32)
        for rank, (out, lse) in enumerate(merged(states, of_rank, sink, scattered)):
            mine = part(heads, rank, world_size) if scattered else slice(None)
            # Roundings of each weight, product and sum over ranks, of the sink and the division; of m - reference.
            bound = (world_size + 8) * 2.0**-24
            assert ((out.double() - want[0][:, :, mine]).abs() <= bound * size[:, :, mine]).all()
            torch.testing.assert_close(lse.double(), want[1][:, mine], rtol=bound, atol=bound)
            assert torch.equal(out, same[0][:, :, mine]), "the bits of an all-gather"
            assert torch.equal(lse, same[1][:, mine])
    assert all(m.counts[0] == 2 for m in of_rank)


def test_a_launch_repeats_for_the_same_number_of_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    repeats = SimpleNamespace(repeat=lambda key, tensors, launch: keys.append(key))
    monkeypatch.setattr(meet, "_launches", repeats)
    for world_size in (2, 3, 3):
        of_rank, _ = own_mailboxes(world_size)
        meet.meet(random_states(world_size, (1, 1, 4, 8))[0], of_rank[0], None, torch.float32, False)
    assert keys[0] != keys[1] == keys[2]


@interpreted
def test_numbers_wrap_around() -> None:
    of_rank, memory = own_mailboxes(2)
    for x in (*memory, *(m.counts for m in of_rank)):
        x.fill_(2**31 - 2)
    for n in range(4):
        states = random_states(2, (1, 1, 3, 4), n)
        want = finish.finish(states, None, torch.float32)
        for got in merged(states, of_rank, None, False):
            assert torch.equal(got.out, want.out)
    assert of_rank[0].counts[0] == -(2**31) + 2


# ---------------------------------------------------------------- the protocol, in any order


class Wrong(AssertionError):
    """A result that is not that of the merge."""


SHAPE = (1, 1, 2, 2)  # (batch, new, heads, head_dim_v): a program for each of two rows


@functools.cache
def of_merge(world_size: int, n: int) -> tuple[Tensor, Tensor]:
    """Return the states of all ranks in merge n, and the output."""
    states = random_states(world_size, SHAPE, n)
    return states, finish.finish(states, None, torch.float32).out


class Ranks:
    """The hosts of all ranks: each queues merges on streams of its own GPU, calls and replays of a launch.

    Args:
        world_size, seed: as of :class:`World`.
        streams: of every rank, which take turns.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, world_size: int, seed: int, streams: int = 1, dropped: str = ""
    ) -> None:
        self.world = World(world_size, seed, frozenset([dropped]))
        self.launches: list[tuple[Any, ...]] = [()] * world_size  # the last one of each rank
        self.results: list[Result | None] = [None] * world_size
        self.merges = [0] * world_size
        self.static = [[torch.zeros(*SHAPE[:3], SHAPE[3] + 2) for _ in range(streams)] for _ in range(world_size)]
        cuda = SimpleNamespace(
            current_stream=self.world.current,
            stream=lambda stream: contextlib.nullcontext(),
            is_current_stream_capturing=lambda: False,
        )
        monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)  # what is kept is made outside of the simulated mode
        monkeypatch.setattr(mailboxes, "torch", _Torch(cuda))
        monkeypatch.setattr(meet, "dispatch", self.queued)
        monkeypatch.setattr(meet, "_LEAST", 16)
        shared = Shared(self.world, range(world_size))
        self.streams, self.boxes = [], []
        for rank, gpu in enumerate(self.world.gpus):
            self.streams.append([Stream(gpu, f"stream {n}") for n in range(streams)])
            with self.world.host(self.streams[rank][0]):
                self.boxes.append(Mailbox(rank, world_size, CPU, shared.of(rank), 1.0))

    def queued(self, kernel: Any, grid: tuple[int, ...], *args: Any, STEP: int, **constants: Any) -> None:
        """Queue a launch on the current stream: as dispatch(), but in halves."""
        rank = self.world.current().gpu.rank
        self.launches[rank] = (kernel, grid, [alias(x) if isinstance(x, Tensor) else x for x in args], constants)
        self.queue(rank)

    def queue(self, rank: int) -> None:
        kernel, grid, args, constants = self.launches[rank]
        addresses, counts = args[1], args[2]

        def ready() -> bool:
            flags = addresses[rank].item()
            return all(
                reached(flags + (sender * PROGRAMS.value + program) * FLAG.value, int(counts[program]) + 1)
                for sender, program in itertools.product(range(len(addresses)), range(grid[0]))
            )

        def half(step: int) -> None:
            with torch._C.DisableTorchFunction():
                dispatch(kernel, grid, *args, STEP=step, **constants)

        wait = None if "flags" in self.world.dropped else ready
        self.world.kernel("meet", [(None, lambda: half(SEND.value)), (wait, lambda: half(RECEIVE.value))])

    def merge(self, rank: int, replay: bool = False) -> None:
        """Queue what one rank does for its next merge: make its state, merge, compare."""
        n, world = self.merges[rank], self.world
        self.merges[rank] += 1
        states, want = of_merge(len(self.boxes), n)
        turn = n % len(self.streams[rank])
        static = self.static[rank][turn]
        with world.host(self.streams[rank][turn]):
            world.write_tensor("make a state", lambda: static.copy_(states[rank]))
            if replay:
                self.queue(rank)
            else:
                self.results[rank] = self.boxes[rank].merge(static, None, torch.float32, False)
            result = self.results[rank]
            assert result is not None
            out = alias(result.out)

            def compare() -> None:
                if not torch.equal(out, want):
                    raise Wrong(f"rank {rank}, merge {n}")

            world.write_tensor("compare", compare)


def play(ranks: Ranks, merges: int = 4, replays: bool = False) -> None:
    """Queue merges of all ranks and execute everything in an order drawn from the seed."""
    for rank in range(len(ranks.boxes)):
        for n in range(merges):
            ranks.merge(rank, replay=replays and n > 0)
    ranks.world.run()


SEEDS = 5


@interpreted
@pytest.mark.parametrize(
    ("world_size", "streams", "replays"), [(2, 1, False), (3, 1, True), (2, 2, False)],
    ids=["calls", "replays", "two streams"],
)  # fmt: skip
def test_states_are_complete_when_they_are_added(
    monkeypatch: pytest.MonkeyPatch, world_size: int, streams: int, replays: bool
) -> None:
    for seed in few(range(SEEDS), 2):
        play(Ranks(monkeypatch, world_size, seed, streams), replays=replays)


@triton.jit
def _one_slot(mailbox, sender, number, r, WORLD: tl.constexpr, WIDTH: tl.constexpr):
    """As meet._rows, but a merge uses the slot of the one before."""
    slot = mailbox + WORLD * PROGRAMS * FLAG + (sender * PROGRAMS + tl.program_id(0)).to(tl.int64) * meet.REGION
    return slot.to(tl.pointer_type(tl.float32)) + r * WIDTH


@interpreted
@pytest.mark.parametrize("fault", ["one slot", "flags", "stream 1 waits for stream 0"])
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A store before its slot was read; sums before the flags are up; merges that overtake each other."""
    if fault == "one slot":
        monkeypatch.setattr(meet, "_rows", _one_slot)

    def some_order() -> None:
        for seed in range(60):
            play(Ranks(monkeypatch, 2, seed, 2 if "stream" in fault else 1, fault))

    with pytest.raises((Wrong, Deadlock)):
        some_order()


class Waiting:
    """A stream that notes the streams that it waits for."""

    def __init__(self, captured: bool = False) -> None:
        self.captured, self.waited = captured, list[Any]()

    def wait_stream(self, other: Waiting) -> None:
        self.waited.append(other)


def test_a_captured_stream_waits_for_streams_of_its_capture_only(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Waiting] = [Waiting()]

    @contextlib.contextmanager
    def stream(other: Waiting) -> Iterator[None]:
        current.append(other)
        yield
        current.pop()

    cuda = SimpleNamespace(
        current_stream=lambda: current[-1], stream=stream, is_current_stream_capturing=lambda: current[-1].captured
    )
    monkeypatch.setattr(mailboxes, "torch", _Torch(cuda))
    one, two, captured, other, later = Waiting(), Waiting(), Waiting(True), Waiting(True), Waiting(True)
    box = object.__new__(Mailbox)
    box._last = [one, None]  # type: ignore[list-item]
    for x in (one, one, captured, other):
        current[0] = x
        box._follow(x.captured)
    captured.captured = other.captured = False  # the capture has ended
    for x in (later, two):
        current[0] = x
        box._follow(x.captured)
    assert other.waited == [captured]
    assert captured.waited == later.waited == []
    assert two.waited == [one]


# ---------------------------------------------------------------- the code for sm_90, and the watchdog


def compiled_for_hopper() -> dict[str, Any]:
    """Return what the compiler makes of the kernel: the memory instructions in their order, registers, spills."""
    import sass
    from test_triton_targets import resources
    from triton.backends.compiler import GPUTarget

    state, addresses = torch.zeros(1, 1, 32, 130), torch.zeros(2, dtype=torch.int64)
    of_rank = Mailboxes(addresses, torch.zeros(PROGRAMS.value, dtype=torch.int32), 0, 1 << 40, 1 << 40, 1 << 40)
    result = meet.empty_result(state, of_rank, torch.bfloat16, False)
    grid, args, constants = meet._arguments(state, of_rank, None, result)
    constants |= dict(EARLY=True, launch_pdl=True, SCATTERED=False, STEP=meet.BOTH.value)
    compiled = sass.compile_for(GPUTarget("cuda", 90, 32), meet._meet, grid, args, constants)
    pattern = r"\b(?:ld|st|atom|red|bar|multimem|fence|membar)\.[\w.]*(?:global|sync|sys)[\w.]*|griddepcontrol.wait"
    return dict(resources(compiled), code=re.findall(pattern, compiled.asm["ptx"]))


def test_the_code_for_hopper_stores_then_raises_then_waits_then_reads() -> None:
    code = (
        "import json, sys; sys.path.insert(0, 'tests'); import test_meet; "
        "print(json.dumps(test_meet.compiled_for_hopper()))"
    )
    run = fresh.run(code, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr[-2000:]
    made = json.loads(run.stdout.splitlines()[-1])
    assert made["spilled"] == 0
    assert made["registers"] <= 64
    code = made["code"]
    raises, waits = code.index("st.release.sys.global.b32"), code.index("ld.acquire.sys.global.b32")
    stores = [n for n, text in enumerate(code) if text == "st.global.v4.b32"]
    reads = [n for n, text in enumerate(code) if text.startswith("ld.global.cg")]
    assert code[0] == "griddepcontrol.wait", "a launch ahead of time waits for the one before"
    assert len(stores) == 2, "16 bytes at a time to both ranks"
    assert any(code[n] == "ld.global.cg.v4.b32" for n in reads)
    assert "bar.sync" in code[stores[-1] : raises], "the release is for the stores of all threads"
    assert raises < waits
    assert "bar.sync" in code[waits : reads[0]], "each thread waits for one rank"
    assert not any(text.startswith(("multimem", "atom", "red")) for text in code)


def test_the_watchdog_names_the_rank_that_is_late(tmp_path: Path) -> None:
    path = str(tmp_path / "board")
    boards = [Board.create(path, 0, 3), Board.open(path, 1, 3), Board.open(path, 2, 3)]
    for board in boards:
        board.enter(5.0)
    watch = Watch(boards[0], [1, 2])
    for number in (1, 2):
        boards[0].set_word(0, MEET, number)
        boards[1].set_word(1, MEET, number)
        for _ in range(4):
            assert watch.look(1.0) is None, "every merge has the whole time"
        if number == 1:
            boards[2].set_word(2, MEET, 1)
    peer, text = watch.look(2.0) or watch.look(2.0) or (None, "")
    assert peer == 2
    assert "s for the states of exchange 2: rank 2" in text


@pytest.mark.parametrize("dim_v", [8, 64, 128, 256])
def test_a_mailbox_takes_what_its_regions_have_room_for(dim_v: int) -> None:
    tiling = meet._Tiling.of(1 << 20, dim_v)
    assert tiling.tiles * tiling.rows * tiling.width * 4 <= meet.REGION.value
    most = PROGRAMS.value * tiling.tiles * tiling.rows
    box = object.__new__(Mailbox)
    sizes = ((most, True), (most + 1, False), (2 * most, False))
    assert [box.takes(torch.empty(rows, 1, 1, dim_v + 2, device="meta")) for rows, _ in sizes] == [x for _, x in sizes]
    assert not box.takes(torch.empty(1, 1, 4, dim_v + 2, dtype=torch.float64))


def test_a_kernel_gives_up_after_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which names the late rank; a kernel that traps earlier would end the process without a reason."""
    limit = 1.0  # seconds, of a rank's board
    (box,) = Ranks(monkeypatch, 1, 0).boxes
    assert 10.0 < box.mailboxes.patience / 1e9 - limit < 100.0


def test_a_state_that_does_not_fit_is_gathered_and_one_that_does_is_counted() -> None:
    rank, box = VirtualRank(0, 2), SimpleNamespace(takes=lambda state: state.fits)
    rank._mailbox = lambda: box  # type: ignore[assignment,method-assign,return-value]
    for fits, on_gpu in ((False, True), (True, False), (True, True)):
        got = rank.mailbox(SimpleNamespace(is_cuda=on_gpu, fits=fits))  # type: ignore[arg-type]
        assert (got is box, rank.collectives) == ((fits and on_gpu), int(fits and on_gpu))


def test_a_link_makes_its_mailbox_once_and_never_in_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[Any, ...]] = []
    capturing = [True]
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: capturing[0])
    monkeypatch.setattr(memory, "torch", _Torch(cuda))
    monkeypatch.setattr(memory, "Mailbox", lambda *arguments: made.append(arguments) or len(made))
    board = Board.create(str(tmp_path / "board"), 1, 2)
    board.enter(7.0)
    link = object.__new__(memory.Link)
    link.rank, link.world_size, link.device = 1, 2, CPU
    link.share, link.board, link._mailbox = "share", board, None  # type: ignore[assignment]
    assert link.mailbox() is None
    capturing[0] = False
    box = link.mailbox()
    assert made == [(1, 2, CPU, "share", 7.0, board.pinned(MEET))]
    capturing[0] = True
    assert link.mailbox() is box is not None
