"""Choose layout and dataflow where they are "auto": those with the least time by :mod:`.predict.dataflow_time`.

A row that is one document stays in zigzag, also with a window or a prefix: layers of one model differ in these, and
must hold the same tokens. Packed documents, and masks that were made by functions, are balanced where that is predicted
to be faster by :data:`WORTH` at least. Everything that enters is the same on every rank, so that all choose alike
without a message.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .layouts import needs as needs_of_ranks
from .layouts.placement import Placement
from .layouts.relay import relays
from .layouts.schedule import Schedule
from .layouts.shards import LAYOUTS, append
from .masks.common import full
from .masks.pairs import Work
from .plan_arguments import Request, Split
from .transport.group import GroupTransport, Transport

if TYPE_CHECKING:
    from .predict.cost import Costs
    from .predict.dataflow_time import Choice

WORTH = 0.03  # of the time that is predicted for zigzag


def place(request: Request, layout: str | Split, why: str = "") -> Placement:
    """Return the shards of a layout, or those of another plan for the same lengths."""
    mask, name = request.mask, layout if isinstance(layout, str) else layout.layout
    if isinstance(layout, str):
        shards = shards_k = LAYOUTS[layout](mask, request.world_size, request.local_size)
        if mask.seq_len != mask.seq_len_k and not request.held:
            shards_k = LAYOUTS[layout](full(mask.seq_len_k), request.world_size, request.local_size)
    else:
        shards, shards_k = layout.shards, layout.shards_k
    if request.held:  # the keys of every rank that holds earlier tokens and takes these new ones
        shards_k = tuple(map(append, request.held, shards, itertools.repeat(mask.offset)))
    return Placement(name, shards, shards_k, needs_of_ranks.fetches(mask, shards, shards_k), why)


def place_best(
    request: Request, transport: Transport, costs: tuple[Costs, str] | None
) -> tuple[Placement, Choice | None]:
    """Return the shards of the layout that "auto" chooses, and the dataflows for it if they were compared."""
    mask = request.mask
    if request.world_size == 1:
        return place(request, "zigzag"), None
    if mask.seq_len != mask.seq_len_k:
        why = "layout: auto chose zigzag, as queries and keys are not the same tokens"
        return place(request, "zigzag", why), None
    work = Work.of_mask(mask)
    if mask.rows == 1 and len(work.cuts) <= 2 and request.parts["mask"] == "none":
        return place(request, "zigzag", "layout: auto chose zigzag, as the row is one document"), None
    zigzag = place(request, "zigzag")
    pairs = [sum(map(work.of, shard)) for shard in zigzag.shards]
    busiest = max(pairs) * len(pairs) / max(1, sum(pairs))
    if costs is None or busiest < 1 + WORTH:
        why = f"layout: auto chose zigzag, whose busiest rank has {busiest:.3f} of the mean work"
        return replace(zigzag, why=why), None
    balanced = place(request, "balanced")
    choices = choose(request, transport, costs, zigzag), choose(request, transport, costs, balanced)
    slow, fast = (choice.of(request.dataflow).ms for choice in choices)
    words = f"{fast:.2f} ms a layer by the model, zigzag {slow:.2f} ms, with {busiest:.2f} of the mean work on a rank"
    if slow >= fast * (1 + WORTH):
        return replace(balanced, why=f"layout: auto chose balanced: {words}"), choices[1]
    return replace(zigzag, why=f"layout: auto chose zigzag, as balanced would gain too little: {words}"), choices[0]


def choose(request: Request, transport: Transport, costs: tuple[Costs, str], placement: Placement) -> Choice:
    """Return the dataflows for a placement."""
    from .predict.dataflow_time import Choice, Problem

    queries, keys, n = placement.shards, placement.shards_k, request.world_size
    fetched, runs = placement.moved
    neighbours = all(run.step == 1 for shard in keys for run in shard)  # which copies move
    pulls = transport.pulls and neighbours
    problem = Problem(
        device_type=transport.device.type,
        pulls=pulls,
        buffer_bytes=request.buffer_bytes,
        queries=placement.lengths[0],
        keys=placement.lengths[1],
        pairs=needs_of_ranks.pairs(request.mask, queries, keys),
        fetched=fetched,
        runs=runs,
        ring=Schedule(n, placement.needs, request.local_size),
        reduce=Schedule(n, tuple(zip(*placement.needs, strict=True)), request.local_size),
        nodes=request.nodes if relays(request.nodes) and not pulls else (),
        pulls_inside=transport.linked == request.nodes and neighbours,
    )
    return Choice(problem, *costs)


def costs_of(transport: Transport) -> tuple[Costs, str]:
    """Return the costs that decide "auto" on this transport, and where they come from."""
    from .predict import cost

    kind, link = transport.device.type, cost.LINKS[0 if transport.pulls else 1]
    if isinstance(transport, GroupTransport):
        name = torch.cuda.get_device_name(transport.device) if kind == "cuda" else kind
        file = cost.path(name, transport.world_size)
        costs = cost.read(file, link)
        if costs is not None:
            return costs, f"measured, {file}"
    return cost.default(kind, link), f"defaults of {'H200s' if kind == 'cuda' else 'CPU threads'} with {link}"
