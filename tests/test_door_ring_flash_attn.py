"""The door "ring_flash_attn": its functions with its ways to cut rows, and models of transformers, against one
process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from ringattn import virtual
from ringattn.adapters import ring_flash, ring_flash_hf
from ringattn.adapters.doors import ring_flash_attn as door

Bounds = list[int]


def whole(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, window: tuple[int, int], scale: float
) -> Tensor:
    """Return attention of a whole row, (tokens, heads, head_dim), document by document, with a dense mask."""
    outs = []
    for a, b in itertools.pairwise(bounds):
        distance = torch.arange(b - a) - torch.arange(b - a)[:, None]
        left, right = (b - a if n < 0 else n for n in window)
        visible = (distance >= -left) & (distance <= (0 if causal else right))
        x = (x[a:b].transpose(0, 1) for x in (q, k, v))
        outs.append(scaled_dot_product_attention(*x, attn_mask=visible, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


# How the package's own tests cut a row: the indices that a rank holds.


def contiguous(bounds: Bounds, rank: int, ranks: int) -> Tensor:
    return torch.cat([torch.arange(a, b).chunk(ranks)[rank] for a, b in itertools.pairwise(bounds)])


def zigzag(bounds: Bounds, rank: int, ranks: int) -> Tensor:
    chunks = [torch.arange(a, b).chunk(2 * ranks) for a, b in itertools.pairwise(bounds)]
    return torch.cat([x for of_document in chunks for x in (of_document[rank], of_document[2 * ranks - 1 - rank])])


def stripes(bounds: Bounds, rank: int, ranks: int) -> Tensor:
    return torch.stack(torch.arange(bounds[-1]).split(ranks), 1)[rank]


FAMILIES = {
    "ring_flash_attn": (contiguous, 45),
    "zigzag_ring_flash_attn": (zigzag, 60),
    "stripe_flash_attn": (stripes, 45),
    "ring_flash_attn_varlen": (contiguous, 45),
    "zigzag_ring_flash_attn_varlen": (zigzag, 60),
    "llama3_flash_attn_varlen": (None, 61),
}
FORMS = ("", "_kvpacked", "_qkvpacked")


def arguments(family: str, bounds: Bounds, rank: int, ranks: int, causal: bool) -> tuple[Any, ...]:
    """Return what follows the tensors."""
    if family == "llama3_flash_attn_varlen":
        bounds = torch.tensor(bounds, dtype=torch.int32)
        q, k, longest_q, longest_k, keys = ring_flash.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, rank, ranks)
        return q, k, longest_q, longest_k, 1, keys
    if "varlen" in family:
        return torch.tensor(bounds, dtype=torch.int32) // ranks, max(bounds) // ranks
    return ()


@pytest.mark.parametrize(
    ("family", "ranks", "length"),
    [
        *[(family, n, length // (2 * n) * 2 * n) for family, (_, length) in FAMILIES.items() for n in (2, 3)],
        *[(family, 3, 45) for family in ("ring_flash_attn", "ring_flash_attn_varlen", "stripe_flash_attn")],
        *[("llama3_flash_attn_varlen", *case) for case in ((2, 61), (2, 45), (3, 61), (3, 45), (1, 7), (4, 9))],
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_functions(family: str, form: str, ranks: int, length: int) -> None:
    cut, total, bounds = FAMILIES[family][0], length, [0, length]
    if "varlen" in family:
        bounds = [0, total // 3, total // 3, total // 2, total] if cut is None else [0, 2 * ranks, total]
    causal, window = family != "ring_flash_attn", (9, 4)
    heads = (2, 2, 2) if form == "_qkvpacked" else (4, 2, 2)
    torch.manual_seed(0)
    row = [torch.randn(total, n, 8, dtype=torch.float64, requires_grad=True) for n in (*heads, heads[0])]
    expected = whole(*row[:3], bounds, causal, window, 0.3)
    gradients = torch.autograd.grad(expected, row[:3], row[3].detach())
    dense = "varlen" not in family

    def body(group: virtual.VirtualRank) -> tuple[Tensor, ...]:
        index = torch.arange(total).chunk(ranks) if cut is None else None
        at = cut(bounds, group.rank, ranks) if index is None else index[group.rank] if group.rank < len(index) else []
        local = [(x[at][None] if dense else x[at]).detach().requires_grad_() for x in row]
        tensors = local[:3]
        if form:
            apart = 1 if form == "_kvpacked" else 0
            tensors = [*local[:apart], torch.stack(local[apart:3], 2 if dense else 1)]
        function = getattr(ring_flash, f"{family}{form}_func")
        out, lse, _ = function(
            *tensors, *arguments(family, bounds, group.rank, ranks, causal), softmax_scale=0.3, causal=causal,
            window_size=window, return_attn_probs=True, group=group,
        )  # fmt: skip
        again = function(
            *tensors, *arguments(family, bounds, group.rank, ranks, causal), 0.0, 0.3, causal, window, None, False,
            False, group,
        )  # fmt: skip
        assert torch.equal(out, again)
        assert lse.shape == ((1, heads[0], len(at)) if dense else (heads[0], len(at)))
        results = out, *torch.autograd.grad(out, local[:3], local[3].detach())
        for x, want in zip(results, (expected, *gradients), strict=True):
            torch.testing.assert_close(x[0] if dense else x, want[at], rtol=0, atol=1e-12)
        return results

    virtual.run(ranks, body)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("bounds", [[0, 30], [0, 7, 14, 30], [0, 10, 20, 30], [0, 1, 29, 30], [0, 11, 11, 61]])
def test_prepared_boundaries_say_which_keys_are_seen(bounds: Bounds, ranks: int, causal: bool) -> None:
    """As flash-attn's varlen function reads them: causal aligned at the ends of queries and keys."""
    total = bounds[-1]
    document = torch.bucketize(torch.arange(total), torch.tensor(bounds[1:]), right=True)
    want = document[:, None] == document
    if causal:
        want = want.tril()
    seen = []
    for rank, positions in enumerate(torch.arange(total).chunk(ranks)):
        of_q, of_k, longest_q, longest_k, keys = ring_flash.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor(bounds, dtype=torch.int32), causal, rank, ranks
        )
        assert of_q[-1] == len(positions)
        assert of_k[-1] == keys.stop - keys.start
        assert of_q.dtype == of_k.dtype == torch.int32
        assert (longest_q, longest_k) == (of_q.diff().max(), of_k.diff().max())
        visible = torch.zeros(len(positions), total, dtype=torch.bool)
        for (a, b), (c, d) in zip(itertools.pairwise(of_q.tolist()), itertools.pairwise(of_k.tolist()), strict=True):
            block = torch.ones(b - a, d - c, dtype=torch.bool)
            block = block.tril(d - c - (b - a)) if causal else block
            visible[a:b, keys.start + c : keys.start + d] = block
        seen.append(visible)
    assert torch.equal(torch.cat(seen), want)


def test_signatures_name_every_argument() -> None:
    # Of ring-flash-attn 0.1.8
    options = "dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs group"
    for name, own in (
        ("ring_flash_attn_func", "q k v"),
        ("stripe_flash_attn_kvpacked_func", "q kv"),
        ("zigzag_ring_flash_attn_varlen_qkvpacked_func", "qkv cu_seqlens max_seqlen"),
        (
            "llama3_flash_attn_varlen_kvpacked_func",
            "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice",
        ),
    ):
        assert " ".join(inspect.signature(getattr(ring_flash, name)).parameters) == f"{own} {options}"


def test_what_cannot_be_done_is_refused_by_name() -> None:
    x = torch.randn(1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        ring_flash.ring_flash_attn_func(x, x, x, 0.1)
    with pytest.raises(ValueError, match="zigzag_ring_flash_attn: a rank holds 5 tokens"):
        ring_flash.zigzag_ring_flash_attn_func(x, x, x, causal=True)
    bounds = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="zigzag_ring_flash_attn_varlen: a rank holds 3 tokens"):
        ring_flash.zigzag_ring_flash_attn_varlen_func(x[0], x[0], x[0], bounds, 3, causal=True)
    with pytest.raises(ValueError, match="prepare_cu_seqlens returned, not copies"):
        ring_flash.llama3_flash_attn_varlen_func(x[0], x[0], x[0], bounds, bounds, 3, 3, 1, slice(0, 5))
    (forward,) = ring_flash_hf.create_ring_flash_attention_forward(None, 1)
    with pytest.raises(RuntimeError, match="call update_ring_flash_attn_params"):
        forward(x, x, x, None, 5, True)


def test_ranks_of_different_lengths_are_refused_on_each() -> None:
    def body(group: virtual.VirtualRank) -> None:
        x = torch.randn(1, 5 + group.rank, 2, 8)
        with pytest.raises(ValueError, match="seq_len"):
            ring_flash.ring_flash_attn_func(x, x, x, group=group)

    virtual.run(2, body)


def test_the_package_is_found_under_its_names_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("ring_flash_attn")
    monkeypatch.setitem(sys.modules, "ring_flash_attn", real)
    others = set(sys.modules)
    with ringattn.install("ring_flash_attn"):
        package = importlib.import_module("ring_flash_attn")
        names = [f"{family}{form}_func" for family in FAMILIES for form in FORMS]
        for name in [*names, "llama3_flash_attn_prepare_cu_seqlens"]:
            assert getattr(package, name) is getattr(ring_flash, name)
        for family in FAMILIES:  # each function has a file of its own there
            module = importlib.import_module(f"ring_flash_attn.{family}")
            assert getattr(module, f"{family}_func") is getattr(ring_flash, f"{family}_func")
        import ring_flash_attn.adapters.hf_adapter

        adapter = ring_flash_attn.adapters.hf_adapter
        for name in door.OF_MODELS:
            assert getattr(package, name) is getattr(package.adapters, name) is getattr(adapter, name)
        assert adapter.DATA_PARAMS == {}
    assert sys.modules["ring_flash_attn"] is real
    assert not [name for name in set(sys.modules) - others if name.startswith("ring_flash_attn")]


# --- models ---------------------------------------------------------------------------------------------------------


def model_of(kind: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, attention_dropout=0.0,
    )  # fmt: skip
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "window": lambda: transformers.MistralConfig(**sizes, sliding_window=7),
        "sinks": lambda: transformers.GptOssConfig(
            **sizes,
            sliding_window=7,
            num_local_experts=2,
            num_experts_per_tok=2,
            experts_implementation="eager",
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
    }[kind]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def row_of(lengths: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and positions, (1, tokens), and the boundaries of the documents."""
    tokens = torch.randint(50, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return tokens, positions, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def results(model: nn.Module, logits: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    (logits * weight).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def over_ranks(kind: str, lengths: Bounds, caller: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Do what a caller of ring_flash_attn does, and return this rank's logits and gradients."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    with ringattn.install("ring_flash_attn"), pytest.MonkeyPatch.context() as patch:
        from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
        from ring_flash_attn.adapters import hf_adapter

        model = model_of(kind, "flash_attention_2")
        if caller == "axolotl":  # has a function of its own that calls the package's
            from ring_flash_attn import llama3_flash_attn_varlen_func

            def create(process_group: Any, heads_k_stride: int) -> list[Any]:
                def forward(q, k, v, attention_mask, query_length, is_causal, softmax_scale=None, **others):  # type: ignore[no-untyped-def]
                    params = hf_adapter.DATA_PARAMS
                    return llama3_flash_attn_varlen_func(
                        q.squeeze(0), k.squeeze(0), v.squeeze(0), cu_seqlens_q=params["cu_seqlens_q"],
                        cu_seqlens_k=params["cu_seqlens_k"], max_seqlen_q=params["max_seqlen_q"],
                        max_seqlen_k=params["max_seqlen_k"], heads_k_stride=heads_k_stride,
                        local_k_slice=params["local_k_slice"], softmax_scale=softmax_scale, causal=is_causal,
                        group=process_group,
                    )[None]  # fmt: skip

                return [forward]

            patch.setattr(hf_adapter, "create_ring_flash_attention_forward", create)
        hf_adapter.substitute_hf_flash_attn(process_group=group, heads_k_stride=1)
        tokens, positions, bounds = row_of(lengths)
        if caller == "OpenRLHF":  # pads the row, and ends it twice
            padding = -tokens.shape[1] % ranks
            tokens, positions = (torch.nn.functional.pad(x, (0, padding)) for x in (tokens, positions))
            bounds = torch.nn.functional.pad(bounds, (0, 1), value=tokens.shape[1])
        update_ring_flash_attn_params(bounds, group)
        local, at = (x.chunk(ranks, dim=1)[rank] for x in (tokens, positions))
        logits = model(input_ids=local, position_ids=at, attention_mask=None).logits
        weight = torch.randn(1, sum(lengths), 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        weight = torch.nn.functional.pad(weight, (0, 0, 0, tokens.shape[1] - weight.shape[1]))
        found = results(model, logits, weight.chunk(ranks, dim=1)[rank])
        assert substitute_hf_flash_attn is hf_adapter.substitute_hf_flash_attn
    return found


CASES = [
    ("llama", [20, 10, 31], "slime"), ("llama", [45], "slime"), ("window", [20, 10, 31], "slime"),
    ("sinks", [20, 25], "slime"), ("llama", [20, 10, 31], "OpenRLHF"), ("llama", [7, 54], "axolotl"),
]  # fmt: skip


def all_cases() -> list[Any]:
    return [over_ranks(*case) for case in CASES]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_models_over_ranks_are_those_of_one_process(pools, ranks: int) -> None:  # type: ignore[no-untyped-def]
    of_ranks = pools(ranks).run(all_cases)
    for index, (kind, lengths, _) in enumerate(CASES):
        model = model_of(kind, "eager")
        tokens, positions, _ = row_of(lengths)
        weight = torch.randn(1, sum(lengths), 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        documents = zip(tokens.split(lengths, 1), positions.split(lengths, 1), strict=True)
        of_documents = [model(input_ids=x, position_ids=at).logits for x, at in documents]
        logits, gradients = results(model, torch.cat(of_documents, 1), weight)
        parts = [found[index] for found in of_ranks]
        joined = torch.cat([part[0] for part in parts], 1)[:, : sum(lengths)]
        torch.testing.assert_close(joined, logits, rtol=0, atol=1e-6)
        for name, want in gradients.items():
            total = sum(part[1][name] for part in parts)
            assert (total - want).norm() <= 1e-5 * want.norm(), (kind, lengths, name)


def test_attention_as_before_where_the_switch_is_off() -> None:
    transformers = pytest.importorskip("transformers")
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = functions["flash_attention_2"], transformers.modeling_flash_attention_utils._flash_attention_forward
    with ringattn.install("ring_flash_attn"):
        from ring_flash_attn.adapters.hf_adapter import substitute_hf_flash_attn, use_ring_attn

        functions["flash_attention_2"] = lambda *args, **options: ("theirs", None)
        substitute_hf_flash_attn(None, 1)
        substitute_hf_flash_attn(None, heads_k_stride=1)  # as for a second model
        use_ring_attn(False)
        assert functions["flash_attention_2"](1, 2) == ("theirs", None)
        functions["flash_attention_2"] = before[0]
    functions["flash_attention_2"] = before[0]
    assert transformers.modeling_flash_attention_utils._flash_attention_forward is before[1]


def test_a_module_that_kept_our_function_gets_theirs_once_the_door_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was imported while the door was open; transformers' own is imported before."""
    flash = pytest.importorskip("transformers.modeling_flash_attention_utils")
    monkeypatch.setattr(flash, "_flash_attention_forward", lambda *args, **options: "theirs")
    monkeypatch.setattr(ring_flash_hf, "create_ring_flash_attention_forward", lambda *args: [lambda *args: "ours"])
    monkeypatch.setattr(ring_flash_hf, "check_params", lambda *args: True)
    ring_flash_hf.substitute_hf_flash_attn(None)
    kept = flash._flash_attention_forward
    assert kept() == "ours"
    ring_flash_hf.substituted.close()
    assert kept() == flash._flash_attention_forward() == "theirs"
    assert "transformers.integrations.flash_attention" in sys.modules


def test_a_caller_of_transformers_function_finds_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = pytest.importorskip("transformers").modeling_flash_attention_utils
    monkeypatch.setattr(flash, "_flash_attention_forward", lambda q, *args, **options: (q.shape, options["is_causal"]))
    x, module = torch.zeros(1, 2, 5, 8), types.SimpleNamespace(is_causal=True)
    assert ring_flash_hf.flash_attention_forward(module, x, x, x, None) == (((1, 5, 2, 8), True), None)  # type: ignore[arg-type]


# --- OpenRLHF ------------------------------------------------------------------------------------------


class Gathered(torch.autograd.Function):
    """flash_attn.utils.distributed.all_gather, which needs flash-attn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    lengths, indices = mask.sum(1, dtype=torch.int32), mask.flatten().nonzero().flatten()
    bounds = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), lengths


def pad_input(x: Tensor, indices: Tensor, batch: int, seq_len: int) -> Tensor:
    return x.new_zeros(batch * seq_len, *x.shape[1:]).index_copy(0, indices, x).unflatten(0, (batch, seq_len))


@contextlib.contextmanager
def openrlhf() -> Iterator[Any]:
    """Import its files of models, without the package's other parts and without flash-attn and DeepSpeed."""
    folder = str(importlib.util.find_spec("openrlhf").submodule_search_locations[0])  # type: ignore[union-attr,index]
    padding = dict(index_first_axis=lambda x, i: x[i], rearrange=lambda x, _: x.flatten(0, 1))
    padding |= dict(unpad_input=unpad_input, pad_input=pad_input)
    stubs: dict[str, dict[str, Any]] = {
        "deepspeed": {}, "flash_attn": {}, "flash_attn.utils": {}, "flash_attn.bert_padding": padding,
        "flash_attn.utils.distributed": dict(all_gather=Gathered.apply),
        "openrlhf": dict(__path__=[folder]), "openrlhf.models": dict(__path__=[f"{folder}/models"]),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, items in stubs.items():
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__dict__.update(items)
            patch.setitem(sys.modules, name, module)
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        yield [importlib.import_module(f"openrlhf.models.{name}") for name in ("actor", "loss", "ring_attn_utils")]


def step_of_openrlhf(over_ranks: bool) -> tuple[float, list[Tensor]]:
    """Return loss and gradients of a step of its actor: log-probabilities, entropy, policy loss."""
    from test_hf import build

    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 21), generator=g)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 18:], mask[2, :2] = 0, 0, 0
    actions = torch.ones(3, 8)
    actions[1, 5:] = 0
    group = dist.group.WORLD if over_ranks else None
    with contextlib.ExitStack() as stack:
        actor, loss, ring = stack.enter_context(openrlhf())
        model = build("llama", "sdpa")
        if over_ranks:
            stack.callback(ringattn.install("ring_flash_attn").uninstall)
            importlib.import_module("ring_flash_attn").substitute_hf_flash_attn(group, 1)
            ring.set_ring_attn_group(group)
            model = build("llama", "flash_attention_2")
        policy = actor.Actor(model, temperature=0.8)
        policy.packing_samples = over_ranks
        log_probs, output = policy(
            ids, actions, attention_mask=mask, return_output=True, ring_attn_group=group, return_entropy=True
        )
        noise, advantages = (torch.randn(log_probs.shape, generator=g) for _ in range(2))
        value = loss.PolicyLoss()(log_probs, log_probs.detach() + 0.1 * noise, advantages, action_mask=actions)[0]
        value = value - 0.01 * (output.entropy[:, -8:] * actions).sum() / actions.sum()
        value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients if over_ranks else ():  # as DeepSpeed and DDP do
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return value.item(), gradients


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="pip install --no-deps openrlhf==0.11.2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_actor_of_openrlhf(ranks: int, pools) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("peft", reason="pip install peft")
    expected, wanted = step_of_openrlhf(False)
    for value, gradients in pools(ranks).run(step_of_openrlhf, True):
        assert value == pytest.approx(expected, rel=1e-6)
        for mine, theirs in zip(gradients, wanted, strict=True):
            assert float((mine - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())
