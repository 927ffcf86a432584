"""Run scripts.train in the workers of Ray Train, which starts them, joins them in a group and starts them again.

    python -m scripts.launch.ray_train --workers 16 --resume auto --out /shared/run        # on a node of the cluster
    ray job submit --working-dir . -- python -m scripts.launch.ray_train --workers 16 --resume auto --out /shared/run

Ray is the engine: it finds nodes with free GPUs, connects the workers (NCCL, or gloo without GPUs) and starts all of
them again when one is lost, ``--restarts`` times; ``--resume auto`` then continues from the newest checkpoint, in a
folder that all nodes share. The attention inside the workers is ringattn's. Ray numbers the workers of a node one after
another, so ranks of one node are neighbours.

All other arguments are those of scripts.train. A loop of your own goes into ``work``:
https://docs.ray.io/en/latest/train/getting-started-pytorch.html
"""

from __future__ import annotations

import os
from typing import Any

from ringattn.tools.terminal import Parser
from scripts import train


def work(config: dict[str, Any]) -> None:
    """Train in one worker, which is in its process group already."""
    import ray.train.torch

    args, saved = train.parse(config["arguments"])
    train.run(args, saved, ray.train.torch.get_device())


def trainer(workers: int, cpu: bool, restarts: int, arguments: list[str]) -> Any:
    """Return the TorchTrainer of a run with these arguments of scripts.train; ``fit()`` runs it."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as missing:
        raise SystemExit(f"Ray Train is missing ({missing}); pip install 'ray[train]'") from None
    return TorchTrainer(
        work,
        train_loop_config={"arguments": ["--directory", os.getcwd(), *arguments]},
        # Gloo next to NCCL, so that ranks compare their plans without waiting for the GPU.
        torch_config=TorchConfig(backend="gloo" if cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=not cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    )


def main() -> None:
    parser = Parser("scripts.launch.ray_train", (__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, required=True, help="ranks, each with a GPU of its own")
    parser.add_argument("--cpu", action="store_true", help="workers without GPUs")
    parser.add_argument("--restarts", type=int, default=3, help="how often all workers are started again")
    own, arguments = parser.parse_known_args()
    trainer(own.workers, own.cpu, own.restarts, arguments).fit()


if __name__ == "__main__":
    main()
