"""scripts/train.py: the split changes neither loss nor gradients, no target is lost, and a run can be resumed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn
from ringattn import virtual
from scripts import checkpoint, train

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--context=97", "--layers=1", "--dim=16", "--heads=2", "--kv-heads=1", "--lr=0.01"]


def launch(*arguments: str) -> str:
    """Return the standard output of a run on two gloo ranks, started in the root with paths relative to the caller."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(ROOT)
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 -m scripts.train {' '.join(arguments)}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Run the same small float32 problems on machines with GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(folder: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint of a run."""
    path = checkpoint.newest(folder / "checkpoints", train.PROGRAM)
    assert path is not None
    return train.load_checkpoint(path)


@pytest.mark.long
def test_two_ranks_match_one_process_and_a_resumed_run_continues_exactly(tmp_path, monkeypatch):
    text = f"--text={ROOT / 'ringattn' / 'mask.py'}"
    with monkeypatch.context() as patch:
        patch.setattr(train, "draw", lambda *_: None)
        patch.delenv("RANK", raising=False)
        for name, steps in (("whole", 4), ("half", 2)):
            assert train.main([*TINY, text, f"--steps={steps}", f"--out={tmp_path / name}"]) == 0
        half = tmp_path / "half" / "checkpoints" / "000001-step-2"  # settings come from there
        assert train.main([f"--resume={half}", "--steps=2", f"--out={tmp_path / 'alone'}"]) == 0
    output = launch(f"--directory={tmp_path}", f"--resume={half.relative_to(tmp_path)}", "--steps=2", "--out=ranks")

    whole, alone, ranks = (state(tmp_path / name) for name in ("whole", "alone", "ranks"))
    assert len(set(whole["losses"])) == 4  # it trains
    assert alone["losses"] == whole["losses"]  # bit for bit
    for name, parameter in whole["model"].items():
        assert torch.equal(alone["model"][name], parameter)
        assert train.relative_difference(ranks["model"][name], parameter) < 1e-4
    assert ranks["losses"] == pytest.approx(whole["losses"], rel=1e-5)

    differ = re.search(r"2 ranks and one process differ by at most (\S+)", output)
    assert differ is not None, output
    assert float(differ[1]) < 1e-5
    pytest.importorskip("matplotlib")
    assert (tmp_path / "ranks" / "train.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_labels_are_the_next_bytes_of_the_whole_sequence(alone, layout):
    context, ranks = 101, 4
    tokens, labels = train.next_batch(torch.arange(200, dtype=torch.uint8), context, 0, 0, torch.device("cpu"))
    targets = []
    for rank in range(ranks):
        plan = ringattn.plan(context, virtual.VirtualRank(rank, ranks), causal=True, layout=layout)
        assert torch.equal(plan.shard(labels), plan.shard(tokens) + 1)
        targets.append(plan.shard(labels))
    assert torch.equal(torch.cat(targets, 1).sort().values, torch.arange(1, context + 1)[None] + tokens[0, 0])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_losses_and_gradients_of_ranks_sum_to_those_of_one_process(layout):
    torch.manual_seed(0)
    model, sequence = train.Decoder(2, 32, 4, 2), torch.randint(256, (1, 54))
    tokens, labels = sequence[:, :-1], sequence[:, 1:]  # 53 targets on 3 ranks: shards are uneven

    def part(rank: virtual.VirtualRank) -> list[torch.Tensor]:
        plan = ringattn.plan(53, rank, causal=True, layout=layout)
        loss = train.local_loss(model, tokens, labels, plan, "eager")
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    (whole,) = virtual.run(1, part)
    shares = virtual.run(3, part)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, expected, *parts in zip(names, whole, *shares, strict=True):
        assert train.relative_difference(sum(parts), expected) < 1e-5, name


def test_batches_depend_on_seed_and_step_only(alone):
    text = torch.randint(256, (5000,), dtype=torch.uint8)

    def batch(seed: int, step: int) -> torch.Tensor:
        return train.next_batch(text, 64, seed, step, torch.device("cpu"))[0]

    assert torch.equal(batch(1, 7), batch(1, 7))
    assert not torch.equal(batch(1, 7), batch(1, 8))
    assert not torch.equal(batch(1, 7), batch(2, 7))


@pytest.mark.parametrize("bad", [1e-4, float("nan")])
def test_a_difference_above_the_tolerance_fails(bad, capsys):
    same = train.Comparison(1, "float32", 5.0, 0.0, 0.0, "embed.weight", 1)
    train.report_comparison([same, train.Comparison(2, "float32", 5.0, 1e-7, 1e-6, "embed.weight", 1)], 64)
    with pytest.raises(ArithmeticError, match=r"norm\.weight"):
        train.report_comparison([same, train.Comparison(2, "float32", 5.0, 0.0, bad, "norm.weight", 1)], 64)


def test_peak_memory_counts_tensors_that_are_alive_together():
    size = 4 * 2**20  # bytes of a million floats
    with train.peak_memory(torch.device("cpu")) as peak:
        for _ in range(3):
            x = torch.ones(2**20)
            y = x + 1
            del x, y
    assert 2 * size <= peak() < 2.5 * size


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--heads 3", "head dim"),
        ("--heads 4 --kv-heads 3", "multiple of --kv-heads 3"),
        ("--layout spiral", "zigzag"),
        ("--dataflow magic", "ring"),
        ("--context 0", "at least 1"),
        ("--text /nonexistent", "no such file"),
        ("--resume /nonexistent", "does not exist"),
        ("--resume", "no whole checkpoint"),
    ],
)
def test_mistakes_are_reported_before_any_rank_starts(arguments, error, capsys):
    assert train.main(["--launch", "4", "--dim", "128", "--out=/nonexistent", *arguments.split()]) == 1
    assert error in capsys.readouterr().err


def test_text_too_short(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"x" * 100)
    assert train.main(["--launch", "4", "--text", str(tmp_path / "text"), "--context", "100"]) == 1
    assert "100 bytes" in capsys.readouterr().err
    with mock.patch("torch.distributed.run.main") as torchrun:
        assert train.main(["--launch", "3", "--text", str(tmp_path / "text"), "--context", "99"]) == 0
    words = torchrun.call_args.args[0]
    assert words[:5] == ["--standalone", "--nproc-per-node", "3", "-m", "scripts.train"]
    assert words[5:] == ["--text", str(tmp_path / "text"), "--context", "99"]
    assert "Ctrl-C ends it" in capsys.readouterr().out


def with_torch(out):
    """Return the processes of a run that have begun to import torch. Those of torchrun's ranks are of other groups."""
    numbers = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, of another user, or it has ended
            ours = bytes(out) in (folder / "cmdline").read_bytes()
            if ours and "libtorch_cpu" in (folder / "maps").read_text():
                numbers.append(int(folder.name))
    return numbers


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("moment", "processes"), [("Using", 1), ("This takes", 3), ("  step 2", 3)])
def test_ctrl_c_in_the_demo_is_one_line(moment, processes, tmp_path):
    """While the program is checked, while ranks start, and while they train: all processes of a terminal get SIGINT.
    None of them can handle it before it runs lines of the program, the first of which import torch."""
    words = f"scripts/demo --steps 500 --context 1024 --save-every 500 --out {tmp_path}".split()
    demo = subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"RANKS": "2"}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if line.startswith(moment):
                break
        while len(with_torch(tmp_path)) < processes:
            assert demo.poll() is None
            time.sleep(0.02)
        os.killpg(demo.pid, signal.SIGINT)
        rest = [line.strip() for line in demo.stdout]
        assert demo.wait() == 130
    finally:
        for number in with_torch(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        demo.wait()
    ended = [line for line in rest if line and not line.startswith(("Training", "text", "model", "split", "The same"))]
    ended = [line for line in ended if not re.match(r"step \d|ranks |\d |Largest|This takes", line)]
    assert ended == ["stopped"], rest
