"""How the scripts that torchrun starts join their process group."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def join(device_type: str) -> torch.device:
    """Join the group of all ranks, NCCL for "cuda" and gloo for "cpu", and return this rank's device.

    Raises:
        SystemExit: torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node N {sys.argv[0]}")
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host
    if device_type != "cuda":
        dist.init_process_group("gloo")
        return torch.device(device_type)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
