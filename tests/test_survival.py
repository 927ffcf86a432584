"""Training goes on after a crash: killed ranks, a killed launcher, SIGTERM, and checkpoints that are damaged, of
another program or cannot be written. Every launch has processes of its own, which end with the test."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from scripts import checkpoint, train

ROOT = Path(__file__).resolve().parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# --- Checkpoints of one process ------------------------------------------------------------------------

PROGRAM = "tests"
GUARD = 600.0  # seconds after which a process hangs


def write(folder: Path) -> None:
    torch.save({"x": torch.arange(1000.0)}, folder / "state.pt")
    (folder / "shards").mkdir()
    (folder / "shards" / "0").write_bytes(b"0" * 100)


def test_a_checkpoint_is_whole_and_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 7):  # 7: of a run that started from nothing again
        path = checkpoint.save(tmp_path, step, PROGRAM, write)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002-step-10", "000003-step-7"]
    assert checkpoint.newest(tmp_path, PROGRAM) == path
    assert checkpoint.check(path, PROGRAM) == 7
    assert torch.equal(checkpoint.load(path, "state.pt", {"x"})["x"], torch.arange(1000.0))


def flip(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path / "state.pt", 1000)


def change(**fields: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, **fields}))

    return damage


def pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip, "state.pt is damaged"),
    "truncated": (truncate, "state.pt has 1,000 bytes instead of"),
    "empty file": (lambda path: os.truncate(path / "state.pt", 0), "state.pt has 0 bytes instead of"),
    "missing file": (lambda path: (path / "shards" / "0").unlink(), "shards/0 is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "not a checkpoint of tests"),
    "manifest is a pipe": (pipe, "not a regular file"),
    "deep manifest": (lambda path: (path / "manifest.json").write_text("[" * 10**5), "nested too deeply"),
    "no fields": (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json is damaged"),
    "another version": (change(format=2), "has format 2; this version of tests reads format 1"),
    "another program": (change(program="other"), "is one of other, not of tests"),
    "no step": (change(step=None), "manifest.json is damaged"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_one_line_and_an_older_whole_one_is_taken(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, reason = DAMAGES[what]
    older = checkpoint.save(tmp_path, 5, PROGRAM, write)
    newer = checkpoint.save(tmp_path, 10, PROGRAM, write)
    damage(newer)
    with pytest.raises(checkpoint.CheckpointError, match=reason) as caught:
        checkpoint.check(newer, PROGRAM)
    assert "\n" not in str(caught.value)
    assert checkpoint.newest(tmp_path, PROGRAM) == older
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "it is skipped" in line


def test_a_pickle_with_code_is_not_loaded(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = checkpoint.save(tmp_path, 1, PROGRAM, lambda folder: torch.save({"x": Harmful()}, folder / "state.pt"))
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.pt cannot be read"):
        checkpoint.load(path, "state.pt", {"x"})
    assert not (tmp_path / "made").exists()


def test_other_contents_are_another_version(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, PROGRAM, write)
    with pytest.raises(checkpoint.CheckpointError, match="another version wrote it"):
        checkpoint.load(path, "state.pt", {"x", "y"})


def test_a_folder_that_cannot_be_written_is_noticed_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(checkpoint.CheckpointError, match="Not a directory"):
        checkpoint.check_writable(tmp_path / "out" / "checkpoints")


# --- Several ranks -------------------------------------------------------------------------------------


def messages(root: Path, problem: str) -> list[str]:
    """Return what save, or check, raises on this rank."""
    first = dist.get_rank() == 0

    def fill(folder: Path) -> None:
        if first and problem == "full disk":
            (folder / "state.pt").symlink_to("/dev/full")
            with open(folder / "state.pt", "wb") as file:
                torch.save(torch.zeros(1000), file)
        if first and problem == "too large":
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
            try:
                with open(folder / "state.pt", "wb") as file:
                    torch.save(torch.zeros(1000), file)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        if problem == "one rank":
            (folder / str(dist.get_rank())).write_bytes(b"1")
            if dist.get_rank() == 1:
                raise PermissionError(13, "Permission denied", "1")

    texts = []
    for action in (lambda: checkpoint.save(root, 2, PROGRAM, fill), lambda: checkpoint.check(root / "no", PROGRAM)):
        try:
            action()
        except checkpoint.CheckpointError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("world_size", on_ranks(3))
@pytest.mark.parametrize(
    ("problem", "text"),
    [("full disk", "No space left on device"), ("too large", "File too large"), ("one rank", "Permission denied")],
)
@linux
def test_all_ranks_raise_what_one_could_not_write(
    pools: Any, world_size: int, tmp_path: Path, problem: str, text: str
) -> None:
    checkpoint.save(tmp_path, 1, PROGRAM, write)
    texts = pools(world_size).run(messages, tmp_path, problem)
    assert texts == [texts[0]] * world_size
    saving, checking = texts[0]
    assert text in saving
    assert "\n" not in saving
    assert "does not exist" in checking
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-1"]  # the earlier one, and nothing of this one


# --- Runs of scripts.train -----------------------------------------------------------------------------

STEPS = 120
TINY = ["--context=97", "--layers=1", "--dim=16", "--heads=2", "--kv-heads=1", "--lr=0.01", "--save-every=12"]
# With seed 0 float32 rounding on some processors is 1.8e-5 of a small gradient after a resume; train allows 1e-5.
TINY += ["--seed=2", f"--text={ROOT / 'ringattn' / 'mask.py'}", f"--steps={STEPS}"]


class Launch:
    """A torchrun with two ranks of scripts.train, in its own session."""

    def __init__(self, out: Path, *arguments: str, restarts: int = 0, stop: int = 0) -> None:
        """Start it. It waits at step ``stop``, see :func:`host_jobs.train`."""
        self.out, self.log, self.folder, self.stop = out, out.with_suffix(".log"), out.with_suffix(f".{stop}"), stop
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"stop-{stop}").touch()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        command = (
            f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts} --monitor-interval 0.1"
        )
        command += f" tests/host_jobs.py {self.folder} train --out={out} {' '.join([*TINY, *arguments])}"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """Return the processes of the ranks that are alive."""
        numbers = []
        for folder in Path("/proc").iterdir():
            try:
                line, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
            except OSError:  # not a process, or it has ended
                continue
            ours = f"--out={self.out}\0".encode() in line and b"torch.distributed.run" not in line
            if ours and status.rpartition(")")[2].split()[0] != "Z":
                numbers.append(int(folder.name))
        return sorted(numbers)

    def wait_for_stop(self) -> None:
        end = time.monotonic() + GUARD
        while not (self.folder / f"at-{self.stop}").exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)

    def end(self, seconds: float = GUARD) -> int:
        status = self.process.wait(seconds)
        end = time.monotonic() + GUARD
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.05)
        assert self.ranks() == []
        return status


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(name: str, *arguments: str, restarts: int = 0, stop: int = 0) -> Launch:
        launches.append(Launch(tmp_path / name, *arguments, restarts=restarts, stop=stop))
        return launches[-1]

    yield start
    for run in launches:
        for process in [run.process.pid, *run.ranks()]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.process.wait(GUARD)


def state(out: Path) -> dict[str, Any]:
    path = checkpoint.newest(out / "checkpoints", train.PROGRAM)
    assert path is not None
    return train.load_checkpoint(path)


@pytest.mark.long
@linux
def test_a_run_that_is_terminated_and_loses_a_rank_ends_with_the_bits_of_an_undisturbed_one(launch: Any) -> None:
    undisturbed, disturbed = launch("undisturbed"), launch("disturbed", "--resume=auto", stop=24)
    disturbed.wait_for_stop()
    disturbed.process.terminate()
    assert disturbed.end() != 0
    text = disturbed.log.read_text()
    assert "SIGTERM: stopped after step " in text
    assert "continue with --resume auto" in text
    saved = len(state(disturbed.out)["losses"])
    assert saved == 25
    assert undisturbed.end() == 0, undisturbed.log.read_text()

    again = launch("disturbed", "--resume=auto", restarts=1, stop=48)
    again.wait_for_stop()
    os.kill(again.ranks()[-1], signal.SIGKILL)
    assert again.end() == 0, again.log.read_text()
    assert again.log.read_text().count("resumes after step") == 2

    expected, result = state(undisturbed.out), state(disturbed.out)
    assert result["losses"] == expected["losses"]
    assert len(result["losses"]) == STEPS
    for part in ("model", "optimizer", "random"):
        torch.testing.assert_close(result[part], expected[part], rtol=0, atol=0)


@pytest.mark.long
@linux
def test_ranks_end_with_a_launcher_that_is_killed(launch: Any) -> None:
    run = launch("orphans", stop=12)
    run.wait_for_stop()
    assert len(run.ranks()) == 2
    run.process.kill()
    run.end()


def test_a_damaged_checkpoint_is_reported_in_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    try:
        assert train.main([f"--resume={tmp_path / 'empty'}"]) == 1
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err == (
        f"error: checkpoint {tmp_path / 'empty'}: is not a checkpoint of scripts.train: it has no manifest.json; "
        "pass the folder of one\n"
    )
