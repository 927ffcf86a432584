"""scripts/launch: every file is one that its tool takes; two agents of torchrun, and accelerate, train to the end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import checkpoint, train

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "scripts" / "launch"
TINY = "--context=97 --layers=1 --dim=16 --heads=2 --kv-heads=1 --steps=2 --save-every=1 --text=README.md"


def read(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    return yaml.safe_load((FILES / name).read_text())


def torchrun(**variables: str) -> subprocess.CompletedProcess[str]:
    """Start the script with a program that does nothing, and python that prints its arguments."""
    env = {"PATH": os.environ["PATH"], "PYTHON": "echo", **variables}
    program = ["-m", "scripts.train", "--out", "a b"]
    return subprocess.run([str(FILES / "torchrun"), *program], env=env, capture_output=True, text=True)


# --- Each file, by its tool ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchrun", "slurm.sbatch"])
def test_bash_can_read_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(FILES / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_torchrun_understands_the_options() -> None:
    """And where the program begins."""
    from torch.distributed.run import get_args_parser

    words = torchrun(HOSTS="4", HEAD="node0:1234", HOST="0", RANKS="8", JOB="7").stdout.replace("a b", "a_b").split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    args = get_args_parser().parse_args(words[2:])
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("4", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "node0:1234", "7")
    assert args.rdzv_conf == "is_host=1"
    assert (args.module, args.training_script, args.training_script_args) == (True, "scripts.train", ["--out", "a_b"])


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HOSTS": "two"}, "HOSTS=two must be a number of hosts"),
        ({"HOSTS": "2"}, "HOSTS=2 needs HEAD"),
        ({"HOSTS": "2", "HEAD": "a", "HOST": "2"}, "HOST=2 must be below HOSTS=2"),
        ({"RANKS": "all"}, "RANKS=all must be"),
        ({"RESTARTS": "-1"}, "RESTARTS=-1 must be"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(variables: dict[str, str], text: str) -> None:
    done = torchrun(**variables)
    assert done.returncode == 1
    assert text in done.stderr
    assert done.stdout == ""


def test_without_a_gpu_the_ranks_must_be_given() -> None:
    done = torchrun(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no GPU that torch can use, and RANKS is not given; on CPUs set it, as RANKS=2" in done.stderr


def test_directives_of_slurm() -> None:
    """https://slurm.schedmd.com/sbatch.html: they come before the first command, one option each."""
    text = (FILES / "slurm.sbatch").read_text()
    head, _, program = text.partition("\nset -euo")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", head, re.M))
    assert len(options) == text.count("\n#SBATCH")
    assert "#SBATCH" not in program
    assert options["ntasks-per-node"] == "1", "torchrun starts the ranks"
    assert re.fullmatch(r"TERM@\d+", options["signal"]), "to the ranks, not to the script (B:)"
    for name, pattern in {"nodes": r"\d+", "gpus-per-node": r"\d+", "time": r"(\d+-)?\d\d:\d\d:\d\d"}.items():
        assert re.fullmatch(pattern, options[name]), name


def test_slurm_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    """With commands in the place of Slurm's own that start a task for each of two nodes."""
    commands = {
        "scontrol": "printf 'node7\\nnode9\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "12", "PYTHON": "echo"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(FILES / "slurm.sbatch"), "-m", "scripts.train"],
        cwd=ROOT, env={**env, "PATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line, is_host in zip(lines, "10", strict=True):
        assert "--nnodes 2 " in line
        assert f"--rdzv-endpoint node7 --rdzv-id 12 --rdzv-conf is_host={is_host} -m scripts.train" in line


def test_accelerate_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hands on what it says, to the program's Accelerator or Trainer: as they read it there."""
    launch = pytest.importorskip("accelerate.commands.launch", reason="pip install accelerate")
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands.config import config_args
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(FILES / "accelerate.yaml")
    config = config_args.load_config_from_file(file)  # raises for a field that it does not know
    assert config.rdzv_backend == "c10d"
    assert not config.same_network, "c10d reads rdzv_endpoint, which accelerate sets only where this is false"
    for where in (config.fsdp_config, config.parallelism_config):
        known = {option for action in launch.launch_command_parser()._actions for option in action.option_strings}
        assert [name for name in where if f"--{name}" not in known] == []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    arguments = launch.launch_command_parser().parse_args(["--config_file", file, "train.py"])
    arguments, _, mixed_precision = launch._validate_launch_command(arguments)
    variables = prepare_multi_gpu_env(arguments)
    monkeypatch.undo()
    assert (arguments.use_fsdp, mixed_precision, variables["ACCELERATE_USE_FSDP"]) == (True, True, "true")
    for name, value in variables.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.setenv(name, value)
    assert variables["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"  # of which the door asks the same
    parallel = ParallelismConfig()
    assert (parallel.cp_size, parallel.total_size) == (8, config.num_processes)
    assert FullyShardedDataParallelPlugin().fsdp_version == 2


# Fields of a TrainJob, those of the pods' patches included:
# https://github.com/kubeflow/trainer/blob/master/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
TRAIN_JOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches", "runtimeRef", "suspend", "trainer"},
    "runtimeRef": {"apiGroup", "kind", "name"},
    "trainer": {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"},
    "patch": {"manager", "time", "trainingRuntimeSpec"},
    "pod": {
        "affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector", "schedulingGates",
        "securityContext", "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
    },
    "container": {"env", "name", "securityContext", "volumeMounts"},
}  # fmt: skip


def test_fields_of_a_trainjob(tmp_path: Path) -> None:
    job = read("kubernetes.yaml")
    spec = job["spec"]
    (patch,) = spec["runtimePatches"]
    template = patch["trainingRuntimeSpec"]["template"]
    (node,) = template["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    parts = {
        "": job, "spec": spec, "runtimeRef": spec["runtimeRef"], "trainer": spec["trainer"], "patch": patch,
        "pod": pod, "container": container,
    }  # fmt: skip
    assert {name: part.keys() - TRAIN_JOB[name] for name, part in parts.items()} == {name: set() for name in parts}
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert [patch["trainingRuntimeSpec"].keys(), template.keys(), template["spec"].keys()] == [
        {"template"}, {"spec"}, {"replicatedJobs"},
    ]  # fmt: skip
    assert node["name"] == container["name"] == "node", "the names in the runtime torch-distributed"
    assert "env" not in container, "Kubeflow refuses it for this container"
    assert spec["trainer"]["numNodes"] >= 2
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}

    place = "/workspace/ringattn"
    command = [word.replace(place, str(ROOT)) for word in spec["trainer"]["command"]]
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0-0.ringattn", "PET_MASTER_PORT": "29400"}
    env |= {"PATH": os.environ["PATH"], "PYTHON": "echo", "RANKS": "8"}
    words = [*command, *spec["trainer"]["args"]]
    line = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    parsed = torchrun_arguments(["torchrun", *line.split()[2:]])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 3)
    assert (parsed.rdzv_endpoint, parsed.rdzv_conf) == ("node-0-0.ringattn:29400", "is_host=0")
    assert (parsed.training_script, parsed.training_script_args[:2]) == ("scripts.train", ["--resume", "auto"])


def torchrun_arguments(words: list[str]) -> Any:
    from torch.distributed.run import get_args_parser

    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


def test_fields_of_a_task_of_skypilot() -> None:
    """Those of https://docs.skypilot.co/en/stable/reference/yaml-spec.html"""
    task = read("skypilot.yaml")
    assert task.keys() <= {"name", "num_nodes", "workdir", "resources", "volumes", "envs", "setup", "run"}
    assert task["num_nodes"] >= 2
    assert re.fullmatch(r"\w+:\d+", task["resources"]["accelerators"])
    for part in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=part, text=True).returncode == 0
    env = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "PATH": os.environ["PATH"], "PYTHON": "echo"}
    line = subprocess.run(["bash"], input=task["run"], cwd=ROOT, env=env, capture_output=True, text=True).stdout
    assert "--nnodes 2 --nproc-per-node 8 " in line
    assert "--rdzv-endpoint 10.0.0.7 --rdzv-id ringattn --rdzv-conf is_host=0 -m scripts.train" in line


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    task = sky.Task.from_yaml(str(FILES / "skypilot.yaml"))  # raises for a field that it does not know
    assert task.num_nodes == 2


def test_ray_takes_the_settings_of_its_trainer() -> None:
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
    from scripts.launch import ray_train

    trainer = ray_train.trainer(2, False, 3, ["--steps", "2"])
    assert trainer.scaling_config.num_workers == 2
    assert trainer.run_config.failure_config.max_failures == 3


# --- Runs ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_to_the_end(commands: list[list[str]], out: Path, hosts: list[dict[str, str]]) -> str:
    """Start a command for each host, and return what the first one printed, after all have ended well."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    base |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    runs = [
        subprocess.Popen([*command, *TINY.split(), f"--out={out}"], cwd=ROOT, env=base | host,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, host in zip(commands, hosts, strict=True)
    ]  # fmt: skip
    try:
        texts = [run.communicate(timeout=200)[0] for run in runs]
    finally:
        for run in runs:
            run.terminate()
            run.wait(40)
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(texts)
    path = checkpoint.newest(out / "checkpoints", train.PROGRAM)
    assert path is not None
    losses = train.load_checkpoint(path)["losses"]
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()
    return texts[0]


linux = pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is named lo on Linux")


@pytest.mark.long
@linux
def test_two_agents_meet_and_train_to_the_end(tmp_path: Path) -> None:
    hosts = [{"HOSTS": "2", "HEAD": f"127.0.0.1:{free_port()}", "RANKS": "1"} for _ in range(2)]
    for number, host in enumerate(hosts):
        host |= {"HEAD": hosts[0]["HEAD"], "HOST": str(number)}
    command = [str(FILES / "torchrun"), "--local-addr", "127.0.0.1", "-m", "scripts.train"]
    text = run_to_the_end([command] * 2, tmp_path, hosts)
    assert "2 ranks and one process differ by at most" in text


@pytest.mark.long
@linux
def test_accelerate_trains_to_the_end(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES / "accelerate.yaml")]
    command += ["--num_machines=1", "--num_processes=2", "--main_process_ip=127.0.0.1", "--main_process_port"]
    text = run_to_the_end([[*command, str(free_port()), "-m", "scripts.train"]], tmp_path, [{}])
    assert "2 ranks and one process differ by at most" in text


@linux
def test_ray_trains_to_the_end(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'")
    command = [sys.executable, "-m", "scripts.launch.ray_train", "--workers=2", "--cpu"]
    text = run_to_the_end([command], tmp_path, [{}])
    assert "2 ranks and one process differ by at most" in text


# --- SIGTERM, which comes twice, and threads without signals ---------------------------------------------


def test_a_second_sigterm_ends_the_process_only_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends one to torchrun and to its ranks, and torchrun another one to the ranks."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    with checkpoint.Termination() as termination:
        termination._note(15, None)
        termination._note(15, None)
        assert termination.received
        assert sent == []
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + checkpoint.APART + 1)
        termination._note(15, None)
        assert sent == [(os.getpid(), 15)]


def test_a_thread_other_than_the_main_one_trains_without_a_handler() -> None:
    """As in the workers of Ray."""
    received: list[bool] = []

    def body() -> None:
        with checkpoint.Termination() as termination:
            received.append(termination.received)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert received == [False]
