"""From whole rows to shards: every field against its definition, token by token; errors are raised on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import mask as masks
from ringattn import virtual
from ringattn.training import batch as batches

IGNORE = -100
ROWS = 2


def make(seq_len: int, ids: list[list[int]] | None, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 100, (ROWS, seq_len), generator=g)
    labels = tokens.clone()
    labels[torch.rand(ROWS, seq_len, generator=g) < 0.2] = IGNORE
    made = {"input_ids": tokens, "labels": labels, "weights": torch.rand(ROWS, seq_len, 3, generator=g)}
    if ids is not None:
        made["documents"] = torch.tensor(ids)
    return made


def targets_by_definition(labels: Tensor, ids: Tensor) -> Tensor:
    out = torch.full_like(labels, IGNORE)
    for b in range(labels.shape[0]):
        for i in range(labels.shape[1] - 1):
            if ids[b, i] >= 0 and ids[b, i] == ids[b, i + 1]:
                out[b, i] = labels[b, i + 1]
    return out


def positions_by_definition(ids: Tensor) -> Tensor:
    """From the start of the row; again from 0 at each document after the first."""
    out = torch.zeros_like(ids)
    for b in range(ids.shape[0]):
        at, first = 0, True
        for i in range(ids.shape[1]):
            starts = ids[b, i] >= 0 and (i == 0 or ids[b, i - 1] != ids[b, i])
            if starts and not first:
                at = 0
            first = first and not starts
            out[b, i] = at
            at += 1
    return out


PACKED = {
    "one document": None,
    "packed": [[0] * 4 + [1] + [2] * 8, [0] * 9 + [3] * 4],
    "right padding": [[0] * 10 + [-1] * 3, [0] * 13],
    "left padding": [[-1] * 5 + [0] * 8, [-1] * 1 + [0] * 12],
    "packed and padded": [[-1, -1, 0, 0, 0, 1, 1, -1, 2, 2, 2, -1, -1], [5] * 6 + [-1] * 7],
    "all padding": [[-1] * 13, [0] * 13],
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
@pytest.mark.parametrize("name", PACKED)
def test_shards_are_the_definition_of_each_field(name: str, world_size: int, layout: str) -> None:
    ids = PACKED[name]
    whole = make(13, ids)
    doc = torch.zeros(ROWS, 13, dtype=torch.int64) if ids is None else torch.tensor(ids)
    expected = {
        **{key: whole[key] for key in ("input_ids", "labels", "weights")},
        "shift_labels": targets_by_definition(whole["labels"], doc),
        "position_ids": positions_by_definition(doc).expand(ROWS, -1),
    }

    def body(rank: virtual.VirtualRank) -> list[int]:
        plan = ringattn.plan(
            13, rank, causal=True, layout=layout, window_size=(3, 0), documents=batches.documents(whole)
        )
        local = plan.shard_batch(whole)
        assert set(local) == set(expected)
        for key, want in expected.items():
            rows = local[key].shape[0]
            assert torch.equal(local[key], want[:rows][:, plan.positions].expand_as(local[key])), key
            assert rows == ROWS or bool((want[:1] == want).all())
        return plan.positions.tolist()

    held = virtual.run(world_size, body)
    assert sorted(p for positions in held for p in positions) == list(range(13))


def test_given_positions_and_targets_are_only_cut() -> None:
    whole = make(12, None)
    whole["position_ids"] = torch.arange(12)[None] + 7  # one row for all
    whole["shift_labels"] = whole["labels"] + 1000
    plan = ringattn.plan(12, virtual.VirtualRank(1, 3), causal=True)
    local = plan.shard_batch(whole)
    assert torch.equal(local["position_ids"], whole["position_ids"][:, plan.positions])
    assert torch.equal(local["shift_labels"], whole["shift_labels"][:, plan.positions])
    three = plan.shard_batch({**whole, "position_ids": torch.arange(72).reshape(3, ROWS, 12)})["position_ids"]
    assert torch.equal(three, torch.arange(72).reshape(3, ROWS, 12)[..., plan.positions])


def test_embeddings_stay_differentiable_and_other_values_are_handed_on() -> None:
    x = torch.randn(ROWS, 12, 4, requires_grad=True)
    image = torch.randn(5, 3)
    plan = ringattn.plan(12, virtual.VirtualRank(0, 2), causal=True)
    local = plan.shard_batch(
        {
            "inputs_embeds": x,
            "image": image,
            "time_first": torch.arange(24).reshape(12, 2),
            "name": "n",
            "scalar": torch.tensor(3),
        },
        seq_dims={"image": None, "time_first": 0},
    )
    assert local["image"] is image
    assert local["name"] == "n"
    assert torch.equal(local["time_first"][:, 0] // 2, plan.positions)
    local["inputs_embeds"].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0, :, 0].nonzero()[:, 0], plan.positions)


# --- documents() ---------------------------------------------------------------------------------------


def ids_of(**batch: object) -> list[list[int]] | None:
    found = batches.documents({"input_ids": torch.zeros(len(batch.pop("rows", [0])), 8, dtype=torch.int64), **batch})  # type: ignore[arg-type]
    return None if found is None else found.tolist()


def test_documents_of_each_source() -> None:
    cut = [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert ids_of() is None
    assert ids_of(attention_mask=torch.ones(1, 8)) is None
    assert ids_of(documents=torch.tensor([[4, 4, 4, 1, 1, 4, 4, 4]])) == cut  # runs of one id are apart
    assert ids_of(seq_idx=torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]], dtype=torch.int32)) == cut
    assert ids_of(cu_seq_lens_q=torch.tensor([0, 3, 5, 8], dtype=torch.int32)) == cut
    assert ids_of(cu_seqlens_q=torch.tensor([0, 3, 5, 8], dtype=torch.int32)) == cut
    assert ids_of(cu_seqlens=torch.tensor([0, 3, 3, 5, 8])) == cut  # an empty document
    assert ids_of(position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])) == cut
    assert ids_of(position_ids=torch.arange(8)[None]) is None
    assert ids_of(position_ids=torch.arange(24).reshape(3, 1, 8)) is None
    four = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2]).expand(4, 1, 8)  # M-RoPE after the positions in the text
    assert ids_of(position_ids=four) == cut
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    assert ids_of(attention_mask=mask) == [[-1, -1, 1, 1, 1, 1, 1, -1]]
    assert ids_of(attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1, 2, 3, 4, 1]])) == [
        [-1, -1, 1, 1, 1, 1, 1, -1]
    ]
    assert ids_of(attention_mask=mask, cu_seqlens=torch.tensor([0, 4, 8])) == [[-1, -1, 1, 1, 2, 2, 2, -1]]


def test_documents_have_the_number_of_their_run() -> None:
    """Neighbouring documents have different numbers, and padding is -1."""
    found = batches.documents({"input_ids": torch.zeros(1, 6), "documents": torch.tensor([[7, 7, -1, 7, 2, 2]])})
    assert found is not None
    assert found.tolist() == [[0, 0, -1, 2, 3, 3]]


def test_holes_of_a_mask_are_padding_between_documents_that_are_given() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
    assert ids_of(attention_mask=mask, documents=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])) == [
        [0, 0, -1, -1, 2, 2, 2, -1]
    ]


def test_counted_positions() -> None:
    """Of two documents after left padding, some of whose tokens do not count."""
    begin, real = torch.tensor([[0, 1, 1, 1, 1, 5, 5, 7]]), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]]).bool()
    counted = torch.tensor([[0, 1, 0, 1, 1, 1, 1, 0]]).bool()
    assert batches.counted_positions(begin, real, counted).tolist() == [[0, 1, 0, 2, 3, 1, 2, 0]]
    assert batches.counted_positions(begin[:, :0], real[:, :0], counted[:, :0]).shape == (1, 0)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, r"attention_mask is \(1, 1, 8, 8\)"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 0, 0]])}, "value 2.*batch\\['documents'\\]"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 9])},
            r"grow from 0 to seq_len = 8.*\[0, \*itertools.accumulate\(lengths\)\]",
        ),
        ({"documents": torch.zeros(1, 7)}, r"shape \(1, 7\)"),
        (
            {"attention_mask": torch.ones(1, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])},
            "row 0 go from 2 to 0",
        ),
        ({"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])}, r"begin at token 4.*batch\['documents'\]"),
        ({"attention_mask": torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1]])}, "begin at token 7"),
    ],
)
def test_documents_refuses_contradictions(extra: dict[str, Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batches.documents({"input_ids": torch.zeros(1, 8), **extra})


def test_arrays_are_refused_by_their_type() -> None:
    plan = ringattn.plan(12, virtual.VirtualRank(0, 1), causal=True)
    whole = make(12, None)
    for name in ("input_ids", "labels"):
        with pytest.raises(TypeError, match=rf"{name} is of type ndarray; pass a tensor: torch.as_tensor\({name}\)"):
            plan.shard_batch({**whole, name: whole[name].numpy()})


# --- Refusals of shard_batch ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": torch.zeros(ROWS, 9)}, "has 9 tokens a row, but the plan is for 12"),
        ({"image": torch.zeros(5, 3)}, r"image has shape \(5, 3\).*seq_dims=\{'image': dim\}"),
        (
            {"attention_mask": torch.tensor([[1] * 11 + [0]] * ROWS)},
            "token 11 of row 0 is padding, and the plan does not",
        ),
        ({"documents": torch.tensor([[0] * 6 + [1] * 6] * ROWS)}, "token 6 of row 0 begins at 6, and the plan says 0"),
        (
            {"position_ids": torch.tensor([[*range(12)], [*range(7), *range(5)]])},
            r"position_ids of row 1 go from 6 to 0 at token 7.*begins at 0.*documents=.*cu_seqlens=.*zeros",
        ),
        ({"input_ids": None}, "needs input_ids or inputs_embeds"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_refuses_on_every_rank(change: dict[str, Tensor], says: str, world_size: int) -> None:
    """One rank has a bad batch: it raises its error, and the others raise one with its text."""

    def body(rank: virtual.VirtualRank) -> str:
        plan = ringattn.plan(12, rank, causal=True)
        whole = make(12, None)
        if rank.rank == world_size - 1:
            whole = {k: v for k, v in {**whole, **change}.items() if v is not None}
        with pytest.raises(ValueError, match=says) as caught:
            plan.shard_batch(whole)
        return str(caught.value)

    texts = virtual.run(world_size, body)
    assert all(texts[-1][:100] in text for text in texts)


RESTARTS = [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]  # of documents of 5, 3 and 4 tokens
ONES = torch.ones(1, 12, dtype=torch.int64)


@pytest.mark.parametrize(
    ("positions", "more", "of_plan"),
    [
        ([RESTARTS], {}, {}),
        (RESTARTS, {}, {}),
        ([RESTARTS], {"attention_mask": ONES}, {}),
        ([RESTARTS], {}, dict(cu_seqlens=[0, 5, 12])),  # the plan lacks one of two
        ([[*range(12)], RESTARTS], {}, {}),
        ([RESTARTS, RESTARTS], {}, dict(documents=torch.tensor([[0] * 5 + [1] * 3 + [2] * 4, [0] * 12]))),
        ([[0, 1, 2, 3, 50, 51, 52, 53, 54, 55, 56, 57]], {}, {}),  # another part of a document, as for transformers
        ([[1, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]], {}, {}),  # left padding of which neither mask nor plan tells
        ([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0]], {}, {}),  # and right padding
        ([[float(x) for x in RESTARTS]], {}, {}),
        ([[RESTARTS]] * 4, {}, {}),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_refuses_positions_that_restart_inside_a_document_of_the_plan(
    positions: list, more: dict[str, Tensor], of_plan: dict[str, object], causal: bool
) -> None:
    batch = {"position_ids": torch.tensor(positions), **more}
    rows = batch["position_ids"].shape[-2] if batch["position_ids"].ndim > 1 else 1
    batch["input_ids"] = torch.zeros(rows, 12, dtype=torch.int64)
    plan = ringattn.plan(12, virtual.VirtualRank(0, 1), causal=causal, **of_plan)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"position_ids of row \d go from"):
        plan.shard_batch(batch)
    # Either fix that the error names is one.
    if not of_plan:
        plan.shard_batch({**batch, "documents": torch.zeros(rows, 12, dtype=torch.int64)})
    batch.pop("attention_mask", None)
    if torch.is_tensor(ids := batches.documents(batch)):
        ringattn.plan(12, virtual.VirtualRank(0, 1), causal=causal, documents=ids).shard_batch(batch)


@pytest.mark.parametrize(
    ("positions", "real", "of_plan"),
    [
        ([[*range(12)]], None, {}),
        ([[*range(7, 19)]], None, {}),
        ([[x / 4 for x in range(12)]], None, {}),  # interpolated
        ([[0] * 12], None, {}),
        ([RESTARTS], None, dict(cu_seqlens=[0, 5, 8, 12])),
        ([RESTARTS], [[1] * 12], dict(cu_seqlens=[0, 5, 8, 12])),
        ([[*range(12)]], None, dict(cu_seqlens=[0, 5, 8, 12])),  # absolute positions of packed documents
        ([[*range(9), 0, 0, 0]], None, dict(cu_seqlens=[0, 9, 12])),  # padding as a document: pad_to_multiple_of
        ([[*range(9), 8, 8, 8]], None, {}),
        ([[*range(9), 1, 1, 1]], [[1] * 9 + [0] * 3], {}),  # as transformers pads
        ([[1, 1, 1, *range(9)]], [[0] * 3 + [1] * 9], {}),
        ([[0, 0, 0, *range(9)], [*range(12)]], [[0] * 3 + [1] * 9, [1] * 12], {}),
        ([[[*range(12)]], [RESTARTS], [RESTARTS]], None, {}),  # M-RoPE
        ([[[*range(12)]], [RESTARTS], [RESTARTS], [RESTARTS]], None, {}),  # after the positions in the text
        ([RESTARTS], None, dict(mask=masks.tree([-1, -1, -1], [5, 3, 4]))),
        ([[0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]], None, dict(mask=masks.tree([-1, 0, 0, 0], [3, 3, 3, 3]))),
    ],
)
def test_takes_positions_that_are_no_contradiction(
    positions: list, real: list | None, of_plan: dict[str, object]
) -> None:
    batch = {"position_ids": torch.tensor(positions)}
    batch["input_ids"] = torch.zeros(batch["position_ids"].shape[-2], 12, dtype=torch.int64)
    if real is not None:
        batch["attention_mask"] = torch.tensor(real)
        if not of_plan:
            of_plan = dict(documents=batch["attention_mask"] - 1)
    plan = ringattn.plan(12, virtual.VirtualRank(1, 2), causal="mask" not in of_plan, **of_plan)  # type: ignore[arg-type]
    local = batches._shard(plan, batch, {})  # what a rank does before it asks the others
    assert torch.equal(local["position_ids"], batch["position_ids"][..., plan.positions])


def test_positions_of_no_tokens_or_one() -> None:
    for n in (0, 1):
        whole = {"input_ids": torch.zeros(1, n), "position_ids": torch.zeros(1, n, dtype=torch.int64)}
        plan = ringattn.plan(n, virtual.VirtualRank(0, 1), causal=True)
        assert plan.shard_batch(whole)["position_ids"].shape == (1, n)


def test_a_mask_of_other_rows_is_refused() -> None:
    plan = ringattn.plan(12, virtual.VirtualRank(0, 1), mask=masks.rows([masks.causal(12)] * 3))
    with pytest.raises(ValueError, match="the plan's mask has 3 rows, but the batch has 2"):
        plan.shard_batch(make(12, None))


@pytest.mark.parametrize("what", ["value", "name", "shape"])
def test_different_rows_are_the_same_error_on_every_rank_and_do_not_leak(what: str) -> None:
    secret = 987654321

    def body(rank: virtual.VirtualRank) -> str:
        plan = ringattn.plan(12, rank, causal=True)
        whole = make(12, None)
        plan.shard_batch(whole)  # agrees
        if rank.rank == 2:
            if what == "value":
                whole["input_ids"][1, 3] = secret
            elif what == "name":
                whole["more"] = torch.zeros(ROWS, 12)
            else:
                whole = {k: v[:1] for k, v in whole.items()}
        with pytest.raises(ValueError, match="data-parallel rank") as caught:
            plan.shard_batch(whole)
        return str(caught.value)

    texts = virtual.run(3, body)
    assert len(set(texts)) == 1
    assert "[2]" in texts[0]
    assert ("input_ids" if what == "value" else "names, shapes and dtypes") in texts[0]
    assert str(secret) not in texts[0]
    again = virtual.run(3, body)
    assert set(again) != set(texts), "hashes are keyed per run"


def test_more_tensors_than_an_exchange_can_name() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        plan = ringattn.plan(4, rank)
        whole = {"input_ids": torch.zeros(1, 4), **{f"t{i:03}": torch.full((1, 4), i) for i in range(60)}}
        assert torch.equal(plan.shard_batch(whole)["t059"], torch.full((1, 2), 59))
        whole["t059"][0, 0] += rank.rank
        with pytest.raises(ValueError, match="other tensors"):
            plan.shard_batch(whole)

    virtual.run(2, body)


def test_over_processes(pools) -> None:  # type: ignore[no-untyped-def]
    assert pools(2).run(_over_gloo) == [True, True]


def _over_gloo() -> bool:
    plan = ringattn.plan(13, causal=True)
    whole = make(13, None)
    local = plan.shard_batch(whole)
    want = targets_by_definition(whole["labels"], torch.zeros(ROWS, 13))
    whole["labels"][0, 0] += plan.rank
    with pytest.raises(ValueError, match=r"labels is .* on ranks"):
        plan.shard_batch(whole)
    return torch.equal(local["shift_labels"], want[:, plan.positions])
