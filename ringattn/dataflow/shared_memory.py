"""Memory that copy engines use in the dataflow "gather", which stays allocated between calls."""

from __future__ import annotations

from ..layouts.schedule import buffer_rows, carried_waves
from ..plans import Plan
from ..shape import Shape
from .gathered import head_waves, relay_of, uses_copy_engines


def pulled_waves(plan: Plan, s: Shape, backward: bool) -> list[slice]:
    """Return the key heads that copy engines bring together; of a gather by node, two waves fit into
    ``plan.buffer_bytes``."""
    fits = head_waves(plan, s, backward)
    return fits if relay_of(plan) is None else carried_waves(fits, s.q_heads, plan.transport.device.type, backward)


def heads_of(waves: list[slice]) -> tuple[int, int]:
    """Return the heads of the largest wave, and those that are in memory at the same time."""
    most = max(wave.stop - wave.start for wave in waves)
    return most, min(2, len(waves)) * most


def shared_bytes(plan: Plan, s: Shape, backward: bool) -> int:
    """Return the bytes of keys that other ranks read, the receive buffer and, in a backward, what other ranks push
    gradients into; 0 where messages move keys."""
    if not uses_copy_engines(plan):
        return 0
    relay = relay_of(plan)
    lengths, fetches = (plan.local_lengths_k, plan.fetches) if relay is None else (relay.lengths, relay.fetches)
    ranks = plan.world_size if relay is None else max(map(len, relay.nodes))
    longest, token = max(lengths), s.batch * (s.head_dim + s.value_dim)  # elements of one key head
    heads, resident = heads_of(pulled_waves(plan, s, backward))
    buffered = max(resident, heads_of(pulled_waves(plan, s, False))[1])  # as large as the forward made it
    total = (2 * s.kv_heads * longest + buffered * buffer_rows(fetches[plan.rank])) * token * s.itemsize
    return total + backward * (ranks - 1) * heads * longest * token * s.state_itemsize
