"""From whole rows to shards: every field against its definition, token by token; errors are raised on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn import loss, virtual
from ringattn import mask as masks
from ringattn.mask import Mask
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
    assert ids_of(documents=torch.tensor([[4, 4, 4, 1, 1, 7, 7, 7]])) == cut
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
    found = batches.documents({"input_ids": torch.zeros(1, 6), "documents": torch.tensor([[7, 7, -1, 5, 2, 2]])})
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


# One description, every function that reads it: the same documents from all, or the same refusal.

IDS_READERS = {
    "plan": lambda x: ringattn.plan(8, documents=x).mask,
    "mask": lambda x: masks.documents(x, 8),
    **{
        name: lambda x, name=name: masks.documents(read(**{name: x}), 8)  # type: ignore[misc]
        for name in ("documents", "seq_idx")
    },
}
BOUNDS_READERS = {
    "plan": lambda x: ringattn.plan(8, cu_seqlens=x).mask,
    "plan for keys": lambda x: ringattn.plan(8, cu_seqlens=x, cu_seqlens_k=x, seq_len_k=8).mask,
    "mask": lambda x: masks.packed(x, 8),
    "blocks": lambda x: masks.blocks(8, x) & masks.packed(x, 8),
    "flash": lambda x: with_flash(x),
    **{
        name: lambda x, name=name: masks.documents(read(**{name: x}), 8)  # type: ignore[misc]
        for name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k")
    },
}
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)


def read(**described: object) -> Tensor:
    """Ids of a row of 8 tokens, or the plan's own where documents() says that there is one document only."""
    whole = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), **described}
    ids = batches.documents(whole)
    plan = ringattn.plan(8, causal=True, documents=ids)
    assert set(plan.shard_batch(whole)) == {"input_ids", "position_ids"}
    return torch.zeros(1, 8, dtype=torch.int64) if ids is None else ids


def with_flash(bounds: object) -> Mask:
    from ringattn.flash import flash_attn_varlen_func

    known = [0, 3, 5, 8] if len(bounds) > 2 else [0, 8]  # type: ignore[arg-type]
    q = torch.randn(8, 1, 8)
    with ringattn.use(ringattn.plan(8, cu_seqlens=known)):
        flash_attn_varlen_func(q, q, q, torch.as_tensor(bounds), torch.as_tensor(bounds), 8, 8)
    return masks.packed(known, 8)


@pytest.mark.parametrize("dtype", [*INTEGERS, list])
@pytest.mark.parametrize(
    "values", [[0, 0, 0, 1, 1, 2, 2, 2], [5, 5, 5, 1, 1, 9, 9, 9], [0] * 8, [1, 1, -1, -1, 0, 0, -1, -1]]
)
def test_ids_have_one_meaning(values: list[int], dtype: Any) -> None:
    if -1 in values and dtype is not list and not dtype.is_signed:
        pytest.skip("no room for padding")
    ids: Any = [values] if dtype is list else torch.tensor([values]).to(dtype)
    line = torch.tensor(values)
    want = ((line[:, None] == line) & (line >= 0))[None]
    for name, reader in IDS_READERS.items():
        assert torch.equal(reader(ids).dense(), want), name


@pytest.mark.parametrize("dtype", [*INTEGERS, list])
@pytest.mark.parametrize("values", [[0, 3, 5, 8], [0, 8], [0, 3, 3, 5, 8]])
def test_boundaries_have_one_meaning(values: list[int], dtype: Any) -> None:
    want = masks.packed(values, 8).dense()
    for name, reader in BOUNDS_READERS.items():
        assert torch.equal(reader(values if dtype is list else torch.tensor(values).to(dtype)).dense(), want), name


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(1, 8),
        torch.zeros(1, 8, dtype=torch.bool),
        torch.zeros(1, 8, dtype=torch.complex64),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(1, 7, dtype=torch.int64),
        torch.zeros(1, 1, 8, dtype=torch.int64),
        [[0, 0, 0, 1, 1, 0, 0, 0]],
        [[0, 0, -1, 0, 1, 1, 1, 1]],
        [[0, 0, 0, 0, -2, -2, -2, -2]],
        [0.5] * 8,
        "documents",
        [None],
        object(),
    ],
)
def test_ids_are_refused_by_all_or_none(ids: object) -> None:
    refused_alike(ids, IDS_READERS, ("documents", "seq_idx"))


@pytest.mark.parametrize(
    "bounds",
    [
        [0.0, 8.0], [False, True], [3, 5], [0, 3], [0, 3, 9], [0, 5, 3, 8], [[0, 8]], [8], [], [0, -1, 8],
        torch.tensor(8), torch.zeros(2, dtype=torch.complex64),
    ],
)  # fmt: skip
def test_boundaries_are_refused_by_all_or_none(bounds: object) -> None:
    names = ("cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "size")
    others = {name: reader for name, reader in BOUNDS_READERS.items() if name not in ("flash", "blocks")}
    refused_alike(bounds, others, names)
    for name in ("flash", "blocks"):
        if name == "blocks" or (isinstance(bounds, list) and bounds):
            with pytest.raises((TypeError, ValueError)):
                BOUNDS_READERS[name](bounds)


def refused_alike(value: object, readers: dict[str, Any], names: tuple[str, ...]) -> None:
    """All raise the same error, but for the name of the argument."""
    errors = set()
    for reader in readers.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            reader(value)
        text = str(caught.value)
        for name in names:
            text = text.replace(name, "NAME")
        errors.add((type(caught.value), text))
    assert len(errors) == 1, errors


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (dict(documents=[[0] * 4 + [1] * 4]), dict(cu_seqlens=[0, 5, 8]), "documents says .* token 4 .*, and cu"),
        (dict(documents=[[0] * 8]), dict(seq_idx=[[0] * 5 + [1] * 3]), "seq_idx says .* token 5 .*, and documents"),
        (dict(cu_seqlens=[0, 4, 8]), dict(cu_seqlens_k=[0, 8]), "cu_seqlens says .* token 4"),
        (
            dict(documents=[[0] * 7 + [-1]]), dict(seq_idx=[[0] * 8]),
            "documents says that token 7 of row 0 is padding, and seq_idx",
        ),
        (
            dict(documents=[[0] * 7 + [-1]]), dict(attention_mask=torch.ones(1, 8)),
            "documents says that token 7 of row 0 is padding, and attention_mask does not",
        ),
        (
            dict(cu_seqlens=[0, 4, 8]), dict(attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]])),
            r"one document \(the last ones begin at token 2\)",
        ),
    ],
)  # fmt: skip
def test_two_descriptions_that_contradict_each_other(first: dict, second: dict, says: str) -> None:
    for described in ({**first, **second}, {**second, **first}):
        whole = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), **described}
        with pytest.raises(ValueError, match=says):
            batches.documents(whole)
        with pytest.raises(ValueError):
            ringattn.plan(8).shard_batch(whole)
    read(**first)  # leaving one of them out is a fix


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        (dict(documents=[[0] * 4 + [1] * 3 + [-1]]), dict(cu_seqlens=[0, 4, 7, 8]), [0, 0, 0, 0, 1, 1, 1, -1]),
        (dict(documents=[[-1] * 2 + [1] * 6]), dict(cu_seqlens=[0, 8]), [-1, -1, 1, 1, 1, 1, 1, 1]),
        (dict(seq_idx=[[0] * 4 + [1] * 4]), dict(cu_seqlens=[0, 4, 8]), [0, 0, 0, 0, 1, 1, 1, 1]),
        (dict(cu_seqlens=[0, 4, 8]), dict(cu_seqlens_k=[0, 4, 4, 8]), [0, 0, 0, 0, 1, 1, 1, 1]),
        (dict(documents=[[0] * 8]), dict(position_ids=torch.tensor([[0, 1, 2, 3] * 2])), [0] * 8),
        (dict(cu_seqlens=[0, 4, 8]), dict(position_ids=torch.arange(8)[None]), [0] * 4 + [1] * 4),
        (dict(position_ids=torch.arange(8)[None] / 4), {}, [0] * 8),  # interpolated
        (dict(position_ids=torch.tensor([[0, 0.25, 0.5, 0.75] * 2])), {}, [0] * 4 + [1] * 4),
        (dict(position_ids=torch.tensor([0, 1, 2, 3] * 2)), {}, [0] * 4 + [1] * 4),
    ],
)
def test_two_descriptions_of_the_same(first: dict, second: dict, want: list[int]) -> None:
    for described in ({**first, **second}, {**second, **first}):
        ids = batches.documents({"input_ids": torch.zeros(1, 8), **described})
        assert (ids[0].tolist() if ids is not None else [0] * 8) == want


def test_boundaries_are_those_of_every_row_as_in_plan() -> None:
    whole = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "cu_seqlens": [0, 3, 8]}
    ids = batches.documents(whole)
    assert ids is not None
    assert ids.tolist() == [[0] * 3 + [1] * 5] * 2
    for packed in (dict(documents=ids), dict(cu_seqlens=[0, 3, 8]), dict(documents=ids[:1])):
        assert ringattn.plan(8, **packed).shard_batch(whole)["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] * 2


def test_documents_of_queries_begin_where_queries_do() -> None:
    """Not where the keys do that they see, which may be elsewhere."""
    plan = ringattn.plan(8, cu_seqlens=[0, 2, 2, 8], cu_seqlens_k=[0, 5, 6, 8])
    assert batches.begins(plan).begin.tolist() == [[0, 0, 2, 2, 2, 2, 2, 2]]


# --- Labels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_labels_of_any_integers(dtype: torch.dtype, layout: str) -> None:
    labels = torch.randint(0, 120, (ROWS, 13))
    ids = torch.tensor(PACKED["packed"])
    want = targets_by_definition(labels, ids)
    whole = {"input_ids": labels, "labels": labels.to(dtype), "documents": ids}
    assert torch.equal(batches.shift_labels(whole["labels"], *batches.begins_of(whole)), want)
    plan = ringattn.plan(13, virtual.VirtualRank(1, 3), causal=True, documents=ids, layout=layout)
    local = batches._shard(plan, whole, {})
    assert local["shift_labels"].dtype == torch.int64
    assert torch.equal(local["shift_labels"], want[:, plan.positions])
    logits = torch.randn(ROWS, 13, 120)
    part = loss.cross_entropy(logits, whole["labels"], wrapper="sums")
    torch.testing.assert_close(part, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert int(loss.count_targets(torch.full((1, 3), -100 % 2**8).to(dtype))) == (0 if dtype == torch.int8 else 3)


def test_labels_of_several_codebooks_and_of_other_dims() -> None:
    labels = torch.randint(0, 99, (ROWS, 13, 13))
    ids = torch.tensor(PACKED["packed and padded"])
    want = torch.stack([targets_by_definition(labels[..., i], ids) for i in range(13)], 2)
    plan = ringattn.plan(13, virtual.VirtualRank(0, 2), causal=True, documents=ids)
    tokens = {"input_ids": labels[..., 0]}
    for dim in (1, 2, -1):
        whole = {**tokens, "labels": labels.transpose(1, dim)}
        local = batches._shard(plan, whole, {"labels": dim})
        assert torch.equal(local["shift_labels"].transpose(1, dim), want[:, plan.positions])
        assert torch.equal(local["labels"].transpose(1, dim), labels[:, plan.positions])
    first = {**tokens, "labels": labels[..., 0].T}
    assert torch.equal(batches._shard(plan, first, {"labels": 0})["shift_labels"].T, want[:, plan.positions, 0])


@pytest.mark.parametrize(
    "labels", [torch.tensor([1, 0]), torch.rand(2, 5), torch.rand(2, 12), torch.ones(2, 12) > 0, torch.tensor(3)]
)
def test_labels_of_whole_rows(labels: Tensor) -> None:
    """They are refused with a way out, which works."""
    plan = ringattn.plan(12, causal=True)
    whole = {"input_ids": torch.zeros(2, 12, dtype=torch.int64), "labels": labels}
    says = "dtype.*another name" if labels.shape == (2, 12) else r"seq_dims=\{'labels': None\}"
    with pytest.raises((TypeError, ValueError), match=says):
        plan.shard_batch(whole)
    with pytest.raises((TypeError, ValueError)):
        batches.shift_labels(labels, *batches.begins(plan))
    local = plan.shard_batch(whole, seq_dims={"labels": None})
    assert local["labels"] is labels
    assert "shift_labels" not in local
    if labels.shape == (2, 12):
        renamed = plan.shard_batch({"input_ids": whole["input_ids"], "scores": labels})
        assert torch.equal(renamed["scores"], labels)


def test_what_one_rank_cannot_shard_is_an_error_on_all() -> None:
    def body(rank: virtual.VirtualRank) -> None:
        plan = ringattn.plan(12, rank, causal=True)
        with pytest.raises((IndexError, ValueError), match="shard\\(\\) got dim 7"):
            plan.shard_batch(make(12, None), seq_dims={"weights": 7 if rank.rank else 1})

    virtual.run(2, body)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, r"attention_mask is \(1, 1, 8, 8\)"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 0, 0]])}, "value 2.*batch\\['documents'\\]"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 9])},
            r"cu_seqlens ends with 9; it must end with seq_len = 8",
        ),
        ({"cu_seqlens": torch.tensor([3, 5])}, r"start with 0.*\[0, \*itertools.accumulate\(lengths\)\]"),
        ({"documents": torch.zeros(1, 7, dtype=torch.int64)}, r"shape \(1, 7\)"),
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
