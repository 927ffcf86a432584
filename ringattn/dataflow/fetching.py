"""How keys and values arrive in the dataflow "gather", and how their gradients leave: the choice between four ways.

A rank's buffer is a list of :class:`~..layouts.schedule.Fetch`: runs of neighbouring tokens of one owner, sorted by
position.

                              ranks of one host                  ranks of several hosts
    GPUs that share memory    copy engines (ringattn.peer)       messages to one rank of a host, from which copy
                                                                 engines of the others fetch (carrying.py)
    others, and layouts in    messages (messages.py)             messages to one rank of a host, and from there to
    which runs interleave                                        the others (by_node.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..kernels.contract import Block, Keys
from ..layouts.schedule import head_groups
from ..peer.link import Link
from ..peer.pull import FetchBuffers, Pattern, Pull
from ..peer.push import GradientBuffers, Push
from ..plans import Plan
from ..trace import named
from .base import Call
from .by_node import RelayedGradients, fetch_by_node, routes_between, routes_inside
from .carrying import Exchange, PushedToCarriers, fetch_carried, pattern_of
from .gathered import head_waves, relay_of, uses_copy_engines
from .messages import SentGradients, fetch_by_messages, routes_of
from .parts import GradientReturn, Part


def fetch_keys(
    call: Call, block: Block, waits: Callable[[Keys, slice], bool], *, backward: bool, in_place: bool = False
) -> Iterator[Part]:
    """Yield the parts in the order in which they come; the next one arrives while a part is used.

    Args:
        waits: ``(keys, query heads)``: may the kernel get keys that are still arriving?
        in_place: if the kernel gets such keys, it reads this rank's own where they are
            (:class:`~ringattn.kernels.contract.OwnKeys`), and they are not copied.
    """
    link = _link(call)
    if link is None:
        yield from _by_messages(call, block, backward)
        return

    k, v, plan, relay = call.k, call.v, call.plan, relay_of(call.plan)
    if relay is not None:
        yield from fetch_carried(call, block, Exchange.of(call, link, relay, backward))
        return
    cut = head_waves(plan, call.shape, backward)
    key = ("fetch buffers", plan.handle, *(wave.stop for wave in cut), k.shape, v.shape, k.dtype)
    buffers = link.prepare(key, lambda: FetchBuffers(link, k, v, _flat(plan), cut))
    pull = Pull(link, buffers, k, v, in_place)

    def start(wave: int) -> tuple[Keys, bool, list[slice]]:
        count, q_heads = cut[wave].stop - cut[wave].start, call.q_heads(cut[wave])
        keys = Keys(*buffers.kv[wave], block)
        whole = waits(keys, q_heads)
        q_count = q_heads.stop - q_heads.start
        groups = [slice(0, count)] if whole else head_groups(count, q_count, call.q.device.type, backward)
        with named("wave", wave, "pull"):
            pull.start(wave, groups)
        return keys, whole, groups

    started = start(0)
    for wave, heads in enumerate(cut):
        keys, whole, groups = started
        if wave + 1 < len(cut):
            started = start(wave + 1)
        if whole:
            yield Part(wave, None, call.q_heads(heads), keys._replace(ready=pull.ready(wave)), len(cut) == 1)
        for i, g in enumerate(() if whole else groups):
            pull.wait(wave, g)
            q_heads = call.q_heads(slice(heads.start + g.start, heads.start + g.stop))
            some = Keys(keys.k[:, :, g], keys.v[:, :, g], block)
            yield Part(wave, g, q_heads, some, len(cut) == len(groups) == 1, i == 0, i == len(groups) - 1)
        pull.release(wave)


def prepare_fetches(plan: Plan) -> None:
    """Make the tables of what is fetched from where, before they are needed, without the device."""
    relay = relay_of(plan)
    if relay is not None:
        routes_between(plan, relay)
    if uses_copy_engines(plan):
        _flat(plan) if relay is None else pattern_of(plan, relay)
    elif relay is None:
        routes_of(plan)
    else:
        routes_inside(plan, relay)


def _flat(plan: Plan) -> Pattern:
    return plan.once("pattern", lambda: Pattern.flat(plan.fetches, plan.local_lengths_k))


def _link(call: Call) -> Link | None:
    """Return the shared memory to pull through; None for messages, also where tokens of several ranks interleave: a
    copy moves neighbouring tokens."""
    plan = call.plan
    return plan.transport.link(call.q) if plan.seq_len_k > 0 and uses_copy_engines(plan) else None


def _by_messages(call: Call, block: Block, backward: bool) -> Iterator[Part]:
    relay, groups = relay_of(call.plan), _groups(call, backward)
    return fetch_by_messages(call, block, groups) if relay is None else fetch_by_node(call, block, groups, relay)


def _groups(call: Call, backward: bool) -> list[slice]:
    """Return the key heads that messages fetch one after another."""
    options = {} if relay_of(call.plan) is None else {"relayed": True}
    return head_groups(call.k.shape[2], call.q.shape[2], call.q.device.type, backward, **options)


def return_gradients(call: Call) -> GradientReturn:
    """Return how gradients go to their owners, in the waves of :func:`fetch_keys`."""
    k, v, plan, link, relay = call.k, call.v, call.plan, _link(call), relay_of(call.plan)
    if link is None:
        groups = _groups(call, backward=True)
        return SentGradients(call, groups) if relay is None else RelayedGradients(call, groups, relay)
    if relay is not None:
        return PushedToCarriers(call, Exchange.of(call, link, relay, backward=True))

    def make() -> GradientBuffers:
        cut = head_waves(plan, call.shape, backward=True)
        return GradientBuffers(link, (k, v), call.accumulation_dtype, _flat(plan), cut)

    return Push(link, link.prepare(("gradient buffers", plan.handle, k.shape, v.shape, k.dtype), make), (k, v))
