"""Ring attention on processes, by hand and with ringattn, against dense attention in one process.

    torchrun --standalone --nproc-per-node 4 -m docs.start.idea.four_ranks

Each of P ranks holds 1/P of the sequence and computes, on the CPU in float64:

1. by hand, causal attention of its own queries: keys and values travel around the ring, and every shard that arrives
   is absorbed into the state;
2. by hand, attention of the last query over all keys: keys stay, and the ranks' states are summed by all-reduce;
3. with ringattn, the attention of step 1. A plan does the same for any mask, layout, device and number of ranks.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist

import ringattn

from . import streaming as S

SEQ, HEAD_DIM = 256, 16


def send_to_next(x: S.Array) -> S.Array:
    """Send `x` to rank + 1 and return the array of rank - 1, which has the same shape."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = torch.from_numpy(x), torch.empty(x.shape, dtype=torch.float64)
    send, receive = (dist.isend, sent, (rank + 1) % ranks), (dist.irecv, received, (rank - 1) % ranks)
    for message in dist.batch_isend_irecv([dist.P2POp(*send), dist.P2POp(*receive)]):
        message.wait()
    return received.numpy()


def ring(q: S.Array, k: S.Array, v: S.Array) -> tuple[S.Array, S.Array]:
    """Compute causal attention of this rank's queries. q, k, v: (seq, d), seq divisible by the number of ranks.

    Returns the positions of the queries and their outputs. Only this rank's shards of q, k and v are read. Positions
    of other shards follow from the owner's rank, so the mask needs no special case.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    positions = np.split(np.arange(len(q)), ranks)
    i = positions[rank]
    kv = np.stack([k[i], v[i]])
    state = S.State.empty(len(i), v.shape[1])
    for step in range(ranks):
        j = positions[(rank - step) % ranks]  # the owner of the shard that is here
        state = state.absorb(S.biased_scores(q[i], kv[0], i, j, S.causal), kv[1])
        kv = send_to_next(kv)
    return i, state.finalize()[0]


def all_reduce(q: S.Array, k: S.Array, v: S.Array) -> S.Array:
    """Compute attention of the last query, (1, dv), from every rank's state of its own keys."""
    i = np.split(np.arange(len(k)), dist.get_world_size())[dist.get_rank()]
    state = S.State.empty(1, v.shape[1]).absorb(S.scores(q[-1:], k[i]), v[i])
    m = torch.from_numpy(state.m.copy())
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    state = state.rescale(m.numpy())
    l_and_o = torch.from_numpy(np.concatenate([state.l[:, None], state.o], axis=1))
    dist.all_reduce(l_and_o)
    return (l_and_o[:, 1:] / l_and_o[:, :1]).numpy()


def differences() -> dict[str, float]:
    """Return the largest difference from dense attention of each of the three, on this rank."""
    rng = np.random.default_rng(0)  # the same numbers on every rank
    q, k, v = (rng.standard_normal((SEQ, HEAD_DIM)) for _ in range(3))
    dense, _ = S.biased_attention(q, k, v, S.causal)
    i, by_hand = ring(q, k, v)

    plan = ringattn.plan(SEQ, causal=True)
    local_q, local_k, local_v = (plan.shard(torch.from_numpy(x)[None, :, None]) for x in (q, k, v))
    out = ringattn.attention(local_q, local_k, local_v, plan)
    assert isinstance(out, torch.Tensor)  # with return_lse=True it is a pair
    by_ringattn = plan.unshard(out)[0, :, 0].numpy()
    return {
        "ring by hand": np.abs(by_hand - dense[i]).max(),
        "all-reduce by hand": np.abs(all_reduce(q, k, v) - dense[-1]).max(),
        "ringattn": np.abs(by_ringattn - dense).max(),
    }


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo")
    text = ", ".join(f"{name} {difference:.1e}" for name, difference in differences().items())
    print(f"rank {dist.get_rank()}: largest difference from one process: {text}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
