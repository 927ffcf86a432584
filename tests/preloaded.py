"""What the process imports that forks the ranks of a pool (pool.py), so that they need not: 0.3 s each.

Python 3.11 does not give it the paths of its parent, only the folder in which that was started.
"""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cases
import pool
import torch._dynamo
import torch.distributed

import ringattn.virtual

__all__ = ["cases", "pool", "ringattn", "torch"]
gc.freeze()  # a collection in a rank copies no page of theirs
