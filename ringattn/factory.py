"""plan(): check the request, agree on it with all ranks, choose layout and dataflow, and make the Plan.

:class:`Plan` is what users get: the data of :class:`.plans.Plan`, methods that move the tokens of a row between ranks,
and what its dataflow predicts and proves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

from . import choosing, operators, plans
from .dataflow import DATAFLOWS, Dataflow
from .dataflow import choose as choose_dataflow
from .masks.intervals import Mask
from .memo import Memo, on_the_host, untraced
from .plan_arguments import ADVICE, BUFFER_BYTES, Request, unexpected
from .shape import Shape
from .transport import group as transports
from .transport import lockstep
from .transport.agreement import hash_of
from .transport.group import Transport

if TYPE_CHECKING:
    from .predict.cost import Costs


class Plan(plans.Plan):
    __doc__ = plans.Plan.__doc__

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor on every rank, from each rank's part of it. Every rank must call this.

        Differentiable: the gradient is the sum over ranks of what each one's loss says, which is right when the loss is
        the **sum** of the ranks' losses. If every rank computes the same loss from the whole tensor, divide it by
        ``world_size``.
        """
        from . import tokens

        operators.check_transforms("unshard()")
        return tokens.unshard(x, self._dim(x, dim), False, self.seq_len, [], "unshard()", self.handle)

    def unshard_k(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor of keys' tokens on every rank, as :meth:`unshard` does for queries'."""
        from . import tokens

        operators.check_transforms("unshard()")
        return tokens.unshard(x, self._dim(x, dim), True, self.seq_len_k, [], "unshard()", self.handle)

    def shift(self, x: Tensor, n: int = 1, dim: int = 1) -> Tensor:
        """Return, for each of this rank's tokens, the value of the token ``n`` before it (after it, for negative n),
        which another rank may hold; zero where the document or the row has no such token, and at padding. Every rank
        calls this.

        Differentiable. ``x``: this rank's shard, with its tokens in ``dim``; if rows have documents of their own, the
        batch is the first dim. In one process, for a single document: ``F.pad(x, (0, 0, 1, 0))[:, :-1]`` for n = 1.
        """
        from . import tokens

        operators.check_transforms("shift()")
        tokens.check_offset(self, n)
        return tokens.neighbours(x, [n], self._dim(x, dim, "shift()"), self.handle)[0]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the causal depthwise convolution of this rank's tokens, across shards and within documents: see
        :func:`.tokens.shift.causal_convolution`."""
        from . import tokens

        operators.check_transforms("convolve()")
        return tokens.causal_convolution(self, x, weight, bias)

    def heads(self, function: Callable[..., Any], *tensors: Tensor, heads_dim: int = 2) -> Any:
        """Run a function of whole rows for some of the heads on each rank, and return its results for this rank's
        tokens and all heads. Every rank calls this.

        Args:
            function: gets each tensor with all tokens, in the order of the sequence, and this rank's heads: (batch,
                seq_len, heads, ...). Returns tensors of that kind. It must treat heads independently; documents and
                padding are its own to separate.
            tensors: this rank's shards, (batch, local tokens, ...), heads in ``heads_dim``. Their numbers may differ
                (GQA): groups of query heads stay with their key head. Where there are fewer groups than ranks, the
                others run the function with a group of zeros.

        Raises:
            ValueError: shapes that do not fit, or no heads.
        """
        from . import tokens

        operators.check_transforms("heads()")
        return tokens.run_by_heads(self, function, tensors, heads_dim)

    @untraced
    def gathered(
        self, *tensors: Tensor, dim: int = 1, heads: int | None = None, attend: Callable[[Any], Any] | None = None
    ) -> Any:
        """Return what this rank's queries see of per-token tensors that all ranks hold shards of: the keys, values,
        latents or masks that an attention of your own reads. Only these tokens move, and once for each host. Every rank
        calls this, and its backward.

        Differentiable: gradients return to the ranks that hold the tokens, and are summed there in the order of ranks,
        in float32 or float64. Integers and bools have none.

        Args:
            tensors: this rank's shards of keys' tokens, of any dtype and shape, with their tokens in ``dim``.
            heads: with ``attend``, the dim of heads of all tensors and of the results: where they need more memory than
                the plan's ``buffer_bytes``, waves of heads come one after another, each while the one before is used.
                The backward fetches them again.
            attend: gets each :class:`.tokens.visible.Visible`, and returns a tensor or a tuple of them; that of all
                waves is returned, with the heads of all. ``part.heads(q)`` are the query heads of a wave.

        Returns:
            Without ``attend`` a :class:`.tokens.visible.Visible`: ``tensors``, ``positions``, ``documents``,
            ``intervals`` of the queries, ``mask``.

        Raises:
            ValueError, TypeError: tensors that do not fit.
        """
        from .tokens.visible import gathered

        operators.check_transforms("gathered()")
        return gathered(self, tensors, dim, heads, attend)

    @untraced
    def shard_batch(
        self, batch: Mapping[str, Any], *, seq_dims: Mapping[str, int | None] | None = None
    ) -> dict[str, Any]:
        """Return this rank's shard of a dict of whole rows, with ``position_ids`` and ``shift_labels``: the targets,
        shifted over the whole rows, -100 at the ends of documents and at padding. Every rank of the group calls this.

        Tensors of shape (batch, seq_len, ...) are sharded, others named in ``seq_dims`` (name to dim, or to None for
        one that every rank keeps whole: labels of whole rows, of which no targets are made); numbers, strings and
        scalars are handed on; boundaries of documents (``cu_seqlens``, ``seq_idx``, ...) are compared with the plan's
        and left out; without any, ``position_ids`` that do not go on by 1 inside a document of the plan are an error.
        ``position_ids``, if absent, count from the start of the row and again from 0 at each further document.
        Labels are integers of any dtype; targets are int64.

        Raises:
            ValueError, TypeError: a tensor that cannot be split; padding or documents that are not the plan's; rows
                that differ between ranks, the same error on every rank.
        """
        from .training.batch import shard_batch

        self.check_agreement()
        self.note_split()
        return shard_batch(self, batch, seq_dims=seq_dims)

    @property
    def flow(self) -> Dataflow:
        """How shards meet: what runs, predicts and proves this plan."""
        return choose_dataflow(self.dataflow, self.deterministic)

    @on_the_host
    def traffic(self, rank: int | None = None) -> tuple[int, int]:
        """Return the tokens that a rank sends in one traversal: (of shards that travel, of contributions to them)."""
        shards, contributions = self.flow.traffic(self, self.rank if rank is None else rank)
        return sum(shards), sum(contributions)

    @on_the_host
    def traffic_bytes(self, *, backward: bool = False, rank: int | None = None, **shape: int) -> int:
        """Return the bytes that a rank sends in a forward or backward of one layer, see :class:`.shape.Shape`."""
        return sum(self.flow.traffic_bytes(self, Shape.checked(shape), backward, self.rank if rank is None else rank))

    @on_the_host
    def network_bytes(self, *, backward: bool = False, rank: int | None = None, **shape: int) -> int:
        """Return the bytes that a rank sends to ranks of other nodes, so over the network, in a forward or backward of
        one layer. The rest of :meth:`traffic_bytes` stays inside of its node.

        Args:
            backward: those of the backward; otherwise those of the forward.
            rank: the one that sends; this one if absent.
            shape: fields of :class:`.shape.Shape`.
        """
        rank = self.rank if rank is None else rank
        return self.between_nodes(self.flow.traffic_bytes(self, Shape.checked(shape), backward, rank), rank)

    @on_the_host
    def memory_bytes(self, *, backward: bool = False, **shape: int) -> int:
        """Return the predicted peak of what one attention allocates on this rank in addition to its inputs and results;
        ``shape``: :class:`.shape.Shape`. Not counted are gradients of parts of a group of query heads that the Hopper
        backward sums afterwards where there are few keys and key heads: up to 0.1 GB at head dim 128."""
        return self.flow.memory_bytes(self, Shape.checked(shape), backward)

    @on_the_host
    def describe(self, *, kernel: str = "auto", **shape: int) -> str:
        """Return as text which shards meet at which step, the bytes that move, predicted time and memory, why "auto"
        chose this dataflow, and for a ``kernel`` that borrows others which parts run where, and why.

        Predictions are for ``shape``, some of ``batch``, ``q_heads`` (a multiple of ``kv_heads``), ``kv_heads``,
        ``head_dim``, ``head_dim_v`` and ``itemsize`` (:class:`.shape.Shape`); they are arithmetic, not measurements,
        with one set of rates, which the first line names: those that ``benchmarks/calibrate.py`` measured on this
        machine, or default ones of its kind of device. ``group=ringattn.virtual.gpus(8)`` of :func:`ringattn.plan`
        describes GPUs on a machine that has none.
        """
        from .dataflow.description import describe

        return describe(self.flow, self, Shape.checked(shape), kernel)

    @on_the_host
    def verify(self) -> str:
        """Prove this plan, for all ranks: every visible (query, key) pair is computed exactly once, every send has its
        receive in the same order, every contribution comes home exactly once.

        Time O(world_size * (seq_len + seq_len_k)).

        Returns:
            A sentence that says what was proved.

        Raises:
            AssertionError: with what is wrong and where.
        """
        return self.flow.verify(self)


@on_the_host
def plan(
    seq_len: int,
    group: Any = None,
    *,
    seq_len_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    documents: Tensor | None = None,
    prefix: int = 0,
    mask: Mask | None = None,
    layout: str | Plan = "auto",
    dataflow: str = "auto",
    deterministic: bool = False,
    local_size: int | Sequence[int] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    timeout: float | None = None,
    wait: bool = True,
    held: Sequence[Sequence[range]] | None = None,
    **others: Never,
) -> Plan:
    """Plan the attention of one sequence shape. Every rank of the group calls this with the same arguments.

    Args:
        seq_len: global number of queries, >= 0. Shards may be uneven or empty; nothing is padded.
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the default group, or one process alone. A
            :class:`ringattn.virtual.VirtualRank` gives the plan of any rank without processes.
        seq_len_k: global number of keys, if different; positions are then aligned at the end: query i
            stands at ``i + seq_len_k - seq_len``.
        causal: key j is visible to query i only if ``j <= i``. Other masks (a window, documents) hide more.
        window_size: ``(left, right)`` as in flash-attn: ``i - left <= j <= i + right``; -1 is unbounded.
        cu_seqlens: global boundaries of packed documents, ``[0, ..., seq_len]``.
        cu_seqlens_k: those of the keys, ``[0, ..., seq_len_k]``, for cross attention: queries of document d see keys of
            document d. Then ``causal`` and ``window_size`` align positions at the ends of each document, as in
            flash-attn.
        documents: (batch, seq_len) integer ids of packed documents, -1 for padding, when rows differ.
        prefix: with ``causal``, the first ``prefix`` keys are visible to earlier queries too (prefix-LM).
        mask: any mask of :mod:`ringattn.mask`: chunks, spans, blocks, or one of your own; what the other arguments hide
            is hidden, too. Pass documents and padding in the arguments above: :meth:`Plan.shard_batch` needs their
            boundaries.
        layout: "contiguous", "zigzag", "striped" or "balanced" (:data:`.layouts.shards.LAYOUTS`); "auto": "zigzag" for
            rows that are one document, for packed ones and those with ``mask`` the layout that the cost model finds
            faster; or another plan for these lengths, to hold the same tokens: layers with different masks need that.
        dataflow: "ring": keys and values travel; "gather": every rank fetches all the keys and values that it
            needs; "reduce": queries travel and their partial states come home; "auto": the fastest by a model of one
            layer's forward and backward (:mod:`.predict.dataflow_time`), for 32 query heads, 8 key heads, head dim 128,
            bf16 and one row, with the costs that ``benchmarks/calibrate.py`` measured on this machine, or default ones.
            ``describe()`` says why.
        deterministic: the same bits of every result on every run, for any number of ranks, any layout and dataflow, by
            a dataflow of its own (:mod:`.dataflow.same_bits`) that takes more time and memory.
        local_size: ranks per node, which divides the group's size, or one number for each node; None: ranks of a host
            are of a node. A ring becomes a double ring where all nodes are equal, and a gather brings a key into a node
            once (:mod:`.layouts.relay`).
        buffer_bytes: with the dataflow "gather", memory for fetched keys and values and their gradients. Where they
            need more and copy engines fetch them, they come in waves of heads that fit; messages fetch all heads. What
            the ranks of a node carry for each other is in addition (``memory_bytes()`` counts it).
            "auto" chooses no gather that does not fit.
        timeout: seconds that a rank waits for another one that is stopped or does not come, in this call and in
            attention with this plan; None: RINGATTN_TIMEOUT, or else the time limit of the group. The first plan of a
            group also connects the ranks. A rank that has died is detected at once.
        wait: False to make the plan of the next batch while the GPU works on this one: the ranks' arguments are
            compared in the background, and an error about them is raised on every rank in the first attention with the
            plan. That attention compares its own arguments only if no earlier one on this group had the same.
        held: for every rank the growing runs of positions of earlier tokens that it holds; together they are all
            before the queries' own tokens, which follow them. If ``seq_len_k`` says that there are more, those of one
            gap are missing, at the beginning or after some of the first ones, and the mask must hide them.
            :meth:`ringattn.KVCache.plan` passes it. Each call with it makes another plan.

    Returns:
        A plan. It may be kept while the shape and the documents stay the same. Making one never waits for a GPU.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent; arguments that differ between ranks
            (:class:`ringattn.errors.Disagreement`): the same error on every rank, naming the ranks and the field.
        RuntimeError: a rank died (:class:`ringattn.errors.LostPeer`) or did not come (:class:`~.errors.TimedOut`), or
            an earlier call on the group failed (:class:`~.errors.GroupBroken`).
    """
    given = {name: value for name, value in locals().items() if name not in ("group", "wait", "others")}
    limit = None
    with contextlib.suppress(ValueError):  # checked below
        limit = None if timeout is None else transports.seconds("timeout", timeout)
    transport = transports.of(group, limit)
    transport.begin("plan()", timeout=limit, compares=True)
    transport.plans_made += 1
    error: Exception | None = None
    words: dict[str, int | float | str | bool] = {}
    try:
        if others:
            raise unexpected("plan", next(iter(others)))
        request = Request.checked(transport.world_size, transport.hosts, dataflows(), **given)
        words = request.words()
        costs = None
        if transport.world_size > 1 and request.asks_for_costs:
            costs = choosing.costs_of(transport)
            words["calibration"] = hash_of(repr(costs[0]))
    except Exception as bad:  # of any kind: it is reported to the other ranks
        error = bad
    where = lockstep.whereabouts(transport.calls, lines=True) if transport.checks else {}
    here = {"plans": transport.plans_made, "RINGATTN_CHECK": transport.checks, **where}
    agreement = transport.start_agreement("plan()", {**here, **words}, error, ADVICE)
    if wait:
        agreement.check()

    key = (transport.serial, *words.values())
    # With a group that has ended goes the memory that it fetched into. Each plan has its own agreement, which may fail.
    _plans.drop(lambda old: old.transport.ended or not old.is_agreed)
    digest = hash_of(repr(words))
    if held is None:
        result = _plans.once(key, lambda: _make(request, transport, costs, digest))
    else:  # a cache tells its sequences apart by their plans
        result = _make(request, transport, costs, digest)
    result.agree_again(None if wait else agreement)
    if not wait:
        result.flow.prepare(result)
    return result


_plans: Memo[Plan] = Memo(64)


def dataflows() -> tuple[str, ...]:
    """Return every name that ``dataflow=`` takes, except "auto"."""
    return tuple(DATAFLOWS)


def _make(request: Request, transport: Transport, costs: tuple[Costs, str] | None, digest: int) -> Plan:
    layout, dataflow, choice = request.layout, request.dataflow, None
    if layout == "auto":
        placed, choice = choosing.place_best(request, transport, costs)
    else:
        placed = choosing.place(request, layout)
    if dataflow != "auto" or costs is None or request.deterministic:
        choice = None
        if dataflow == "auto":  # one rank exchanges nothing; deterministic plans ignore the name
            dataflow = "ring"
    else:
        choice = choice or choosing.choose(request, transport, costs, placed)
        dataflow = choice.dataflow
    schedule = choose_dataflow(dataflow, request.deterministic).schedule(placed.needs, request.local_size)
    return Plan(request, placed, schedule, dataflow, transport, choice, digest)
