"""Plan: mask, layout and schedule for one sequence shape, agreed by all ranks and used by every layer.

A plan is data: it holds what was decided and derives blocks from it. :mod:`.factory` makes plans, and adds to them what
needs a dataflow: predictions and proofs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .errors import warn
from .kernels.contract import Block
from .layouts import blocks
from .layouts import shards as layouts
from .layouts.placement import Placement
from .layouts.schedule import Schedule, Step
from .masks.pairs import count_below
from .memo import Handles, Memo, on_the_host
from .plan_arguments import Request
from .program import SIGNATURES, Programs
from .transport import lockstep
from .transport.agreement import Agreement, Value
from .transport.group import Transport

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
P = ParamSpec("P")


class Begun(NamedTuple):
    """A call that :meth:`Plan.begin` has begun: as it is shown, and what ranks have compared."""

    call: str
    dataflow: str
    text: str
    signature: tuple[object, ...]
    like: tuple[object, ...]


def once(function: Callable[Concatenate[Plan, P], T]) -> Callable[Concatenate[Plan, P], T]:
    """Make a function of a plan and of hashable positional arguments keep its results with the plan."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def kept(plan: Plan, *arguments: P.args, **named: P.kwargs) -> T:
        positional = signature.bind(plan, *arguments, **named).args[1:] if named else arguments
        return plan.once(function, *positional)

    return kept


class Plan:
    """Which rank attends to which keys, and what moves, for one sequence shape. Made by :func:`ringattn.plan`;
    immutable.

    Not a dataclass: wrappers that cast or move a module's arguments (FSDP's mixed precision) take dataclasses apart and
    rebuild them from copies, and a plan must stay the one that all ranks agreed on.

    Attributes:
        seq_len, seq_len_k: global numbers of queries and keys.
        rank, world_size: of the group.
        layout, dataflow, deterministic, buffer_bytes: as chosen; neither layout nor dataflow is "auto".
        mask: intervals per query, in global positions.
        documents: the part of it that documents and padding hide.
        shards, shards_k: for every rank, the ranges of positions of queries and keys it holds.
        fetches: for every rank the runs of keys that its queries see, its own included, sorted by position.
        needs: ``needs[q_rank][k_rank]``: some query of one rank sees some key of the other.
        schedule: the walk of the shards that travel: keys and values in a ring, queries in a reduce.
        transport: moves tensors between the ranks.
        nodes: the ranks of each node.
        choice: why "auto" chose this dataflow; None where it was given.
        why: why "auto" chose this layout; empty where it was given.
        handle: a number that stands for this plan in the operators of torch.library.
        digest: a hash of the arguments of :func:`ringattn.plan`, the same on all ranks.
        timeout: seconds that a rank waits for another in a call; None: the group's.
        local_lengths, local_lengths_k: queries and keys that each rank holds.
        row: stands for the lengths, documents and padding; equal for layers with other masks.
    """

    def __init__(
        self,
        request: Request,
        placement: Placement,
        schedule: Schedule,
        dataflow: str,
        transport: Transport,
        choice: Any,
        digest: int,
    ) -> None:
        self.mask, self.documents = request.mask, request.documents
        self.seq_len, self.seq_len_k = self.mask.seq_len, self.mask.seq_len_k
        self.deterministic, self.timeout = request.deterministic, request.timeout
        self.nodes, self.row, self.buffer_bytes = request.nodes, request.row, request.buffer_bytes
        self.layout, self.why, self.needs = placement.layout, placement.why, placement.needs
        self.shards, self.shards_k, self.fetches = placement.shards, placement.shards_k, placement.fetches
        self.schedule, self.dataflow, self.choice, self.digest = schedule, dataflow, choice, digest
        self.transport, self.rank, self.world_size = transport, transport.rank, transport.world_size
        self.memo: Memo[Any] = Memo(1 << 14)
        self.programs = Programs()  # of calls that repeat
        self.begun: Memo[Begun] = Memo(SIGNATURES)  # calls whose arguments were checked, by their signatures
        self._is_split = False  # were tokens split by this plan, or its positions asked for?
        self._agreed: dict[tuple[object, ...], str] = {}  # calls that were compared, and their texts
        self._unchecked: Agreement | None = None  # on the arguments of plan()
        self._trusts = False  # that a call is the same on all ranks if they have compared one like it
        # Not when first asked for, which may be inside torch.compile: it cannot trace lengths of ranges.
        self.local_lengths, self.local_lengths_k = placement.lengths
        self.handle = by_handle.add(self)

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, seq_len_k={self.seq_len_k}, rank={self.rank}, world_size={self.world_size}, "
            f"layout={self.layout!r}, dataflow={self.dataflow!r})"
        )

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Plan:
        return self  # immutable; copies of a module share it

    def __reduce__(self) -> str:
        raise TypeError("a Plan belongs to a process group and cannot be pickled; call ringattn.plan() in each process")

    # What this rank holds

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's queries, growing: (local_lengths[rank],) int64, on the group's device; a new
        tensor."""
        return self._copy_of("shards")

    @property
    def positions_k(self) -> Tensor:
        """Global positions of this rank's keys: (local_lengths_k[rank],) int64, on the group's device; a new tensor."""
        return self._copy_of("shards_k")

    def _copy_of(self, shards: str) -> Tensor:
        self.note_split()
        device = self.transport.device
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("the plan describes GPUs that are not here; for positions read plan.shards[plan.rank]")
        if (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack()
            or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        ):  # what is made is a part of a graph, or fake: not to be kept
            return self._positions(shards)
        self.transport.calls.follow(device)
        return self.once(Plan._positions, shards).clone()

    def _positions(self, shards: str) -> Tensor:
        return layouts.positions(getattr(self, shards)[self.rank], self.transport.device)

    def note_split(self) -> None:
        """Note that tokens were split by this plan, or its positions asked for, see :meth:`_warn_of_another_split`."""
        if self._is_split:
            return
        self._is_split = True
        if self.world_size > 1 and not torch.compiler.is_compiling():
            self.transport.splits.put(self.row, (self.layout, self.shards, self.shards_k))

    def _warn_of_another_split(self) -> None:
        """Warn if no tokens were split by this plan, but those of its row by another one that holds others.

        Layers with different windows need a plan each, and all of them the same tokens on a rank (``layout=`` another
        plan). Without it the best layout for each mask is chosen: shards have as many tokens, and the result is
        silently wrong. Attention cannot see where its tensors come from.
        """
        other = self.transport.splits.get(self.row)
        if not self._is_split and other is not None and other[1:] != (self.shards, self.shards_k):
            warn(
                f"attention with a plan of layout {self.layout!r}, by which no tokens were split; those of the same "
                f"row were split by another plan, of layout {other[0]!r}, and on some rank the two hold different "
                "tokens. Make the plans of all layers with layout= the first one, or split the tokens by this one",
                RuntimeWarning,
            )

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole tensor of queries' tokens, along ``dim``: a new tensor, differentiable."""
        return self._shard(x, dim, self.shards, "seq_len")

    def shard_k(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole tensor of keys' tokens, as :meth:`shard` does for queries'."""
        return self._shard(x, dim, self.shards_k, "seq_len_k")

    def _dim(self, x: Tensor, dim: int, what: str = "unshard()") -> int:
        if x.ndim and not -x.ndim <= dim < x.ndim:
            text = f"{what} got dim {dim} for shape {tuple(x.shape)}; pass the one of this rank's tokens"
            raise self.refuse(what, IndexError(text))
        return dim % max(x.ndim, 1)

    def _shard(self, x: Tensor, dim: int, shards: tuple[layouts.Shard, ...], name: str) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"shard() got a {type(x).__name__}; pass a tensor: torch.as_tensor(x)")
        if not -x.ndim <= dim < x.ndim:
            raise IndexError(f"shard() got dim {dim} for shape {tuple(x.shape)}; pass the sequence dim")
        if x.shape[dim] != getattr(self, name):
            raise ValueError(
                f"shard() got {x.shape[dim]} tokens along dim {dim} (shape {tuple(x.shape)}), "
                f"but the plan's {name} is {getattr(self, name)}; pass the whole tensor and its sequence dim"
            )
        self.note_split()
        return layouts.take(x, shards[self.rank], dim)

    # What dataflows read

    @property
    @once
    def steps(self) -> tuple[Step, ...]:
        """This rank's steps of the schedule."""
        return self.schedule.steps(self.rank)

    @once
    def block(self, q_rank: int, k_rank: int) -> Block:
        """Return which keys of ``k_rank`` the queries of ``q_rank`` see, in local indices, on the CPU."""
        return self.make_block(q_rank, self.shards_k[k_rank])

    def make_block(
        self,
        q_rank: int,
        keys: Sequence[range],
        segments_k: tuple[int, ...] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Block:
        """Return which keys of a buffer the queries of a rank see; ``keys``, ``segments_k`` and ``rows`` as of
        :func:`.layouts.blocks.make`."""
        return blocks.make(self.mask, self.shards[q_rank], self._seen(q_rank), keys, segments_k, rows)

    @once
    def _seen(self, q_rank: int) -> list[tuple[Tensor, Tensor]]:
        """Return the visible keys of the queries of a rank under each member of the mask, in global positions."""
        return blocks.intervals(self.mask, self.shards[q_rank])

    @on_the_host
    @once
    def visible(self, q_rank: int, k_rank: int) -> int:
        """Return how many (query, key) pairs of two ranks are visible, summed over the mask's rows: work, up to
        ``4 * heads * head_dim`` floating-point operations each in the forward."""
        return sum(
            int((count_below(run, end) - count_below(run, start)).sum())
            for start, end in self._seen(q_rank)
            for run in self.shards_k[k_rank]
        )

    def between_nodes(self, sent: Sequence[int], rank: int) -> int:
        """Return the part that goes to ranks of other nodes of what a rank sends to each rank."""
        node = next(ranks for ranks in self.nodes if rank in ranks)
        return sum(count for peer, count in enumerate(sent) if peer not in node)

    def once(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """Return ``function(plan, *arguments)``, computed once. The key is the function, so pass a named one."""
        return self.memo.once((function, *arguments), lambda: function(self, *arguments))

    def result_of(self, function: Callable[[Plan], T]) -> T:
        """Return ``function(plan)``. torch.compile can take the result of this method as a constant, by
        ``torch.compiler.assume_constant_result``. Before torch 2.12 it cannot do so for a plain function."""
        return function(self)

    def begin(
        self,
        what: str,
        fields: Mapping[str, Value],
        error: Exception | None = None,
        *,
        part: str = "",
        dataflow: str = "",
        compared: bool = True,
    ) -> Begun:
        """Begin a call of all ranks. They compare its shapes and settings the first time after :func:`ringattn.plan`
        that this rank uses them; with a plan that was made without waiting, the first time on this group; with
        RINGATTN_CHECK=1 every time. Ranks run the same program, so all of them compare in the same call.

        Args:
            what: the call, as ``"attention()"``.
            fields: must be the same on all ranks.
            error: why this rank refuses its arguments; raised here, after the other ranks have heard of it.
            part: of the call, as ``" forward"``.
            dataflow: see :class:`ringattn.errors.Place`.
            compared: False for a call that ranks compare only with RINGATTN_CHECK=1.

        Returns:
            What :meth:`begin_again` takes.

        Raises:
            Exception: those of :meth:`.Transport.begin` and :meth:`.Transport.agree`.
        """
        transport = self.transport
        transport.check_usable()
        self.check_agreement()
        if not compared and not transport.checks and error is None:
            text = ", ".join([f"{name}={value}" for name, value in fields.items()])
            transport.begin(what, dataflow, self.timeout, text)
            return Begun(what, dataflow, text, (), ())
        signature, like = (what, *fields.values()), (what, *(x for name, x in fields.items() if name != "plan"))
        compared_before = signature in self._agreed or (self._trusts and like in transport.calls_agreed)
        compares = self.world_size > 1 and (transport.checks or (compared and not compared_before))
        if error is not None and not transport.checks and (compared_before or self._trusted(what)):
            transport.refuse(what, error)
            raise error
        text = self._agreed.get(signature) or ", ".join(f"{name}={value}" for name, value in fields.items())
        transport.begin(what + part, dataflow, self.timeout, text, compares)
        if compares:
            where = lockstep.whereabouts(transport.calls, transport.checks)
            transport.agree(what, {**where, **fields}, error, lockstep.ADVICE)
            transport.calls_agreed.add(like)
        elif error is not None:
            raise error
        if compared:
            if what == "attention()" and signature not in self._agreed:
                self._warn_of_another_split()
            self._agreed[signature] = text
        return Begun(what + part, dataflow, text, signature, like)

    def begin_again(self, begun: Begun) -> bool:
        """Begin a call like an earlier one, and return True; False, and nothing is done, if ranks must compare it."""
        transport = self.transport
        if self._unchecked is not None:
            self.check_agreement()
        agreed = begun.signature in self._agreed or (self._trusts and begun.like in transport.calls_agreed)
        if transport.checks or not agreed:
            return False
        transport.begin(begun.call, begun.dataflow, self.timeout, begun.text)
        return True

    def _trusted(self, what: str) -> bool:
        """Return whether the other ranks may go on without comparing."""
        return self._trusts and any(call[0] == what for call in self.transport.calls_agreed)

    def agree_again(self, agreement: Agreement | None) -> None:
        """Forget what was compared: every rank has just called :func:`ringattn.plan` and got this plan.

        Args:
            agreement: on the arguments, if it has not been checked.
        """
        self._agreed.clear()
        self._trusts, self._unchecked = agreement is not None, agreement

    def check_agreement(self) -> None:
        """Check that all ranks have made this plan, if that is not known yet. Raise the error of :func:`ringattn.plan`
        if not: the same on every rank, and again in later calls."""
        if self._unchecked is not None:
            self._unchecked.check()
            self._unchecked = None

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks are known to have made this plan."""
        return self._unchecked is None

    def refuse(self, what: str, error: E) -> E:
        """Report ``error`` to the other ranks before it is raised, so that they do not wait for this one, and return
        it. Not in compiled graphs, where nothing has been called yet."""
        transport = self.transport
        if torch.compiler.is_compiling() or self.world_size == 1 or transport.given_up:
            return error
        self.check_agreement()
        if transport.checks or not (self._trusted(what) or any(s[0] == what for s in self._agreed)):
            transport.begin(what, timeout=self.timeout, compares=True)
            transport.agree(what, {}, error)
        else:
            transport.refuse(what, error)
        return error


def not_a_plan(x: object) -> TypeError:
    """Return the error for an argument in the place of a plan."""
    return TypeError(f"plan is of type {type(x).__name__}; pass what ringattn.plan() returns")


by_handle: Handles[Plan] = Handles("plan")
