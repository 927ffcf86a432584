"""Stream memory operations and batched copies: the arguments that the driver gets, and on a GPU their effect."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.peer import driver as driver_module
from ringattn.peer.driver import Copies, Words
from ringattn.peer.watchdog import MOVED, MOVING, Board

needs_gpu = pytest.mark.skipif(not driver_module.available(), reason="needs a GPU and a driver with these operations")


class Driver:
    """A driver that records its calls; every one returns ``error``."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.words: list[list[tuple[int, int, int, int]]] = []  # per call: operation, address, value, flags
        self.copies: list[tuple[int, int, int]] = []
        self.together: list[list[tuple[int, int, int]]] = []  # per call

    def memory_operations(self, stream: int, count: int, operations: Any, flags: int) -> int:
        assert (stream, flags, len(operations)) == (7, 0, count)
        self.words.append([(o.operation, o.address, o.value, o.flags) for o in operations])
        return self.error

    def copy(self, target: int, source: int, size: int, stream: int) -> int:
        self.copies.append((target, source, size))
        return self.error

    def copy_batch(
        self, targets: Any, sources: Any, sizes: Any, count: int, attributes: Any, first: Any, kinds: int, failed: Any,
        stream: int,
    ) -> int:  # fmt: skip
        assert (stream, kinds, first._obj.value) == (7, 1, 0)
        assert (attributes._obj.order, attributes._obj.flags) == (1, 1)
        assert len(targets) == len(sources) == len(sizes) == count
        self.together.append(list(zip(targets, sources, sizes, strict=True)))
        return self.error

    def error_name(self, error: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_NAME" if error == self.error else None
        return 0


STREAM: Any = SimpleNamespace(cuda_stream=7)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    recorder = Driver()
    monkeypatch.setattr(driver_module, "_driver", lambda: recorder)
    return recorder


def test_an_operation_is_laid_out_as_in_cuda_h() -> None:
    """CUstreamBatchMemOpParams: 6 words of 64 bits; the value after the address, the flags after the value."""
    assert ctypes.sizeof(driver_module._Operation) == 48
    offsets = {name: getattr(driver_module._Operation, name).offset for name, _ in driver_module._Operation._fields_}
    assert offsets == dict(operation=0, address=8, value=16, flags=24, alias=32, _pad=40)


def test_attributes_are_laid_out_as_in_cuda_h() -> None:
    """CUmemcpyAttributes: an enum, two CUmemLocation of two ints each, unsigned flags."""
    assert ctypes.sizeof(driver_module._Attributes) == 24
    offsets = {name: getattr(driver_module._Attributes, name).offset for name, _ in driver_module._Attributes._fields_}
    assert offsets == dict(order=0, source=4, target=12, flags=20)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 600])
def test_many_copies_are_queued_in_few_calls_and_one_by_one_by_an_older_driver(driver: Driver, count: int) -> None:
    copies = [(1 << 40 | i, 2 << 40 | i, 3 << 32 | i) for i in range(count)]
    batch = Copies(copies)
    memories = None, *torch.zeros(9).tensor_split((2, 2, 5)), None
    for memory in memories:
        batch.queue(STREAM, memory)
    bases = [0 if memory is None else memory.data_ptr() for memory in memories]
    moved = [[(target, source + base, size) for target, source, size in copies] for base in bases]
    assert [c for call in driver.together for c in call] == [c for call in moved for c in call]
    assert len(driver.together) == len(bases) * -(-count // 255)
    assert driver.copies == []
    driver.copy_batch = None  # type: ignore[assignment]
    batch.queue(STREAM, memories[1])
    assert driver.copies == moved[1]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 600])
def test_many_words_are_queued_in_calls_of_at_most_255_in_their_order(driver: Driver, count: int) -> None:
    words = Words(range(1000, 1000 + count))
    words.write(STREAM, 5)
    assert [len(call) for call in driver.words] == [255] * (count // 255) + [count % 255] * (count % 255 > 0)
    assert [o for call in driver.words for o in call] == [(2, 1000 + i, 5, 0) for i in range(count)]
    driver.words.clear()
    words.wait(STREAM, 6)
    assert [o for call in driver.words for o in call] == [(1, 1000 + i, 6, 0) for i in range(count)]
    driver.words.clear()
    words.wait(STREAM, [-i for i in range(count)])
    assert [o for call in driver.words for o in call] == [(1, 1000 + i, -i % 2**32, 0) for i in range(count)]
    with pytest.raises(ValueError, match=f"{count + 1} values for {count} words"):
        words.wait(STREAM, [0] * (count + 1))


def test_a_wait_is_announced_first(driver: Driver) -> None:
    words = Words([64, 96], before=[8])
    words.wait(STREAM, -5)
    words.write(STREAM, 6)
    value = 2**32 - 5
    assert driver.words == [[(2, 8, value, 0), (1, 64, value, 0), (1, 96, value, 0)], [(2, 64, 6, 0), (2, 96, 6, 0)]]


@pytest.mark.parametrize(
    ("value", "stored"), [(-1, 2**32 - 1), (-(2**31), 2**31), (2**31, 2**31), (2**32, 0), (2**32 + 3, 3)]
)
def test_numbers_wrap_around(driver: Driver, value: int, stored: int) -> None:
    Words([64]).wait(STREAM, value)
    Words([64]).write(STREAM, value)
    assert driver.words == [[(1, 64, stored, 0)], [(2, 64, stored, 0)]]


def test_an_error_names_the_operation_and_the_driver_s_error(driver: Driver) -> None:
    driver_module.copy(STREAM, 1, 2, 3)
    assert driver.copies == [(1, 2, 3)]
    driver.error = 700
    with pytest.raises(RuntimeError, match=r"^queueing words: the CUDA driver says CUDA_ERROR_NAME \(700\)$"):
        Words([64]).write(STREAM, 1)
    with pytest.raises(RuntimeError, match=r"^copying 3 bytes: the CUDA driver says CUDA_ERROR_NAME \(700\)$"):
        driver_module.copy(STREAM, 1, 2, 3)
    with pytest.raises(RuntimeError, match=r"^copying 2 pieces of memory: the CUDA driver says CUDA_ERROR_NAME"):
        Copies([(1, 2, 3), (4, 5, 6)]).queue(STREAM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_not_available_without_a_gpu() -> None:
    assert not driver_module.available()


# --- on a GPU ----------------------------------------------------------------------------------------------------


def address(x: torch.Tensor, i: int = 0) -> int:
    return x.data_ptr() + i * x.element_size()


@needs_gpu
@pytest.mark.parametrize("value", [1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_stream_waits_for_words_of_another_stream(value: int) -> None:
    """The wait ends at the value and past it, not one before it, also where int32 wraps around."""
    words = torch.zeros(300, dtype=torch.int32, device="cuda")
    before = (value - 1) & 0xFFFFFFFF
    words.fill_(before - 2**32 if before >= 2**31 else before)
    seen = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    waiting, writing = torch.cuda.Stream(), torch.cuda.Stream()
    all_words = Words([address(words, i) for i in range(300)])
    all_words.wait(waiting, value)
    with torch.cuda.stream(waiting):
        seen.fill_(1.0)
    done = waiting.record_event()
    Words([address(words, i) for i in range(299)]).write(writing, value)
    writing.synchronize()
    time.sleep(0.05)
    assert not done.query(), "one word has not come"
    Words([address(words, 299)]).write(writing, value + 5)
    done.synchronize()
    assert seen.item() == 1.0
    got = words.cpu().long() & 0xFFFFFFFF
    assert got.tolist() == [value] * 299 + [(value + 5) & 0xFFFFFFFF]


@needs_gpu
def test_streams_and_graphs_write_words_of_a_page_of_the_host() -> None:
    """The page is shared memory, as of a board, and is read by nothing but the processor."""
    board = Board.create(f"/dev/shm/ringattn-test-{os.getpid()}", 0, 2)
    os.unlink(f"/dev/shm/ringattn-test-{os.getpid()}")
    board.device_address = driver_module.pin(board.address, board.size)
    moving, both = Words([board.pinned(MOVING)]), Words([board.pinned(MOVING), board.pinned(MOVED)])
    stream = torch.cuda.Stream()
    moving.write(stream, 7)
    stream.synchronize()
    assert (board.word(0, MOVING), board.word(0, MOVED), board.word(1, MOVING)) == (7, 0, 0)
    assert driver_module.can_capture(lambda stream: both.write(stream, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        moving.write(stream, 3)
    assert board.word(0, MOVING) == 7
    for _ in range(3):
        board.set_word(0, MOVING, 0)
        graph.replay()
        torch.cuda.synchronize()
        assert board.word(0, MOVING) == 3
    board.set_word(0, MOVED, 1)
    both.write(stream, 0)
    stream.synchronize()
    assert (board.word(0, MOVING), board.word(0, MOVED)) == (0, 0)
    del graph


@needs_gpu
def test_a_word_is_written_after_work_that_was_queued_before_it() -> None:
    x, y = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda._sleep(1)  # a kernel that is loaded while a stream waits may wait for that stream
    y.copy_(x.fill_(0.0))
    torch.cuda.synchronize()
    for epoch in range(1, 30):
        Words([address(word)]).wait(second, epoch)
        with torch.cuda.stream(second):
            y.copy_(x)
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000)
            x.fill_(float(epoch))
        Words([address(word)]).write(first, epoch)
        torch.cuda.synchronize()
        assert (y == epoch).all()


@needs_gpu
@pytest.mark.parametrize("together", [True, False])
def test_copies_and_words_make_progress_while_a_kernel_runs(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Copies from pinned memory of the host to the GPU run on a copy engine."""
    if not together:
        monkeypatch.setattr(driver_module._driver(), "copy_batch", None)
    here = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    there = torch.zeros_like(here, device="cuda")
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    back = torch.zeros_like(here).pin_memory()
    main, side, reading = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    cuts = [0, 1, 1000, 4096, 300_000, here.numel()]
    pieces = itertools.pairwise(cuts)
    copies = Copies([(address(there, a), address(here, a), 4 * (b - a)) for a, b in pieces])
    for epoch in (1, 2):
        there.zero_()
        back.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(main):
            torch.cuda._sleep(2_000_000_000)
        spinning = main.record_event()
        copies.queue(side)
        Words([address(word)]).write(side, epoch)
        Words([address(word)]).wait(reading, epoch)
        with torch.cuda.stream(reading):
            back.copy_(there, non_blocking=True)
        reading.synchronize()
        assert not spinning.query(), "the copies waited for the kernel"
        assert torch.equal(back, here), "the word was written before all copies were done"
        torch.cuda.synchronize()
