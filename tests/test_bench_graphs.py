"""benchmarks/graphs.py, with a stand-in for CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_training, graphs


class Recorded:
    """Stands for a CUDA graph: a replay calls the function that was captured, on the same tensors."""

    call: Any = None

    def replay(self) -> None:
        self.call()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(recorded: Recorded, **options: Any) -> Iterator[None]:
        assert options == dict(capture_error_mode="thread_local")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)


def test_a_replay_reads_the_arguments_of_its_call(recorded: None) -> None:
    total = torch.zeros(3)

    def compute(local: dict[str, Any]) -> tuple[Tensor, ...]:
        total.copy_(local["x"] * local["factor"])
        return (total,)

    x = torch.arange(3.0)
    step = graphs.Replayed(compute)
    step.capture(dict(x=x, factor=2))
    step.graph.call = lambda: compute(step.local)
    x += 100  # the graph has memory of its own
    assert torch.equal(step(dict(x=torch.ones(3), factor=2))[0], torch.full((3,), 2.0))
    assert torch.equal(step(dict(x=torch.arange(3.0), factor=2))[0], torch.tensor([0.0, 2.0, 4.0]))


@pytest.mark.parametrize("other", [dict(x=torch.ones(4), factor=2), dict(x=torch.ones(3), factor=3)])
def test_what_a_graph_does_not_read_again_is_refused(recorded: None, other: dict[str, Any]) -> None:
    step = graphs.Replayed(lambda local: ())
    step.capture(dict(x=torch.ones(3), factor=2))
    with pytest.raises(ValueError, match="is another one than in the captured step"):
        step(other)


def test_a_graph_needs_a_gpu_and_rows_of_one_length(capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        ("--graph --device cpu", "--graph captures a CUDA graph, and --device is cpu"),
        ("--graph --device cuda --tokens 64 --warm-up-tokens 8", "--warm-up-tokens 8: a graph is of one shape"),
    ):
        with pytest.raises(SystemExit):
            bench_training.parse(words.split())
        assert error in capsys.readouterr().err
    assert bench_training.parse(["--graph", "--device=cuda", "--tokens=4096"]).warm_up_tokens == 4096
