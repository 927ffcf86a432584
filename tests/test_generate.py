"""scripts/generate.py: on two processes, and that it notices wrong logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringattn
from scripts import generate, train

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_two_processes_and_the_text_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("It was the best of times, it was the worst of times. " * 20)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--context", "401", "--chunk", "150", "--new-tokens", "5", "--text", str(tmp_path / "text")]
    done = subprocess.run(
        [*command, "-m", "scripts.generate", *options],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["world_size"] == 2
    assert result["error"] <= 2 * result["error_of_one_process"] + 2.0**-24
    assert result["error_of_one_process"] < 1e-5
    assert "the worst of times" in done.stdout


def test_one_token_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--context", "30", "--new-tokens", "1"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text.splitlines()[-1])["tokens_per_second"] is None
    assert "tokens/s" not in text


def test_wrong_logits_are_noticed() -> None:
    torch.manual_seed(0)
    model = train.Decoder(2, 32, 2, 1)
    tokens = torch.randint(0, 256, (40,))
    with torch.no_grad():
        plan = ringattn.plan(39, ringattn.virtual.VirtualRank(0, 1), causal=True)
        logits = model(tokens[None, :-1], plan)[0, -9:]
        error, own = generate.compare(model, tokens[:30], tokens[30:39], logits.roll(1, 0))
    assert error > 0.1 > 1e-5 > own


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--graph"], "needs a GPU"),
        (["--context", "1"], "at least 2"),
        (["--dim", "100", "--heads", "3"], "--dim 100 over --heads 3: the head dim must be a whole, even number"),
        (["--heads", "4", "--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        (["--shape", "llama-3.2-1b", "--checkpoint", "out"], "--checkpoint out those of a file; omit one"),
    ],
)
def test_errors(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and "--graph" in options:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        generate.parse(options)
    assert words in capsys.readouterr().err
