"""The paged kernels for Hopper as the compiler makes them, without a GPU, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_cases import Case

from ringattn.kernels.contract import Score
from ringattn.kernels.paged.operands import Call, empty_result

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

CASE = Case([200], group=128, kv_heads=1, dim=576, dim_v=512, page_size=128, shared_values=True, dtype=torch.bfloat16)
KERNELS = {
    "one token": (CASE, 0.0),
    "trees": (replace(CASE, new=2, tree=True, dtype=torch.float16), 20.0),
}


def compiled_for_hopper() -> dict[str, dict[str, Any]]:
    """Return what ptxas makes of latent attention."""
    import sass

    from ringattn.kernels.paged import hopper_latent

    compiled: list[sass.Compiled] = []
    reports = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_latent, "multiprocessors", lambda device: 132)
        patch.setattr(hopper_latent, "combine", lambda *args: None)
        patch.setattr(hopper_latent, "dispatch", lambda kernel, grid, *args, **options: compiled.append(
            sass.compile_for_hopper(kernel, grid, args, options)))  # fmt: skip
        for name, (case, softcap) in KERNELS.items():
            step = case.made()
            pool = step.pools[0]
            result = empty_result(step.q, pool)
            hopper_latent.launch(step.q, pool, step.tables(), Score(0.1, softcap), Call(step.tree), result)
            main = compiled.pop()
            loops = main.loops_with("HGMMA")
            reports[name] = dict(
                warnings=main.warnings, overwritten=main.overwritten_operands(), undefined=main.undefined_uniforms(),
                shared=main.shared, loops=len(loops), ours=sass.OUR_COMPILER,
                reloads=sum("LDL" in text or "STL" in text for loop in loops for _, text in loop.body),
            )  # fmt: skip
    return reports


@pytest.mark.long
def test_latent_attention_compiles_without_serialized_products_and_reloads() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    for name, report in json.loads(run.stdout.splitlines()[-1]).items():
        assert [report[what] for what in ("warnings", "overwritten", "undefined")] == [[], [], []], name
        assert report["shared"] <= 227 * 1024, name
        assert report["loops"] > 0, name
        assert report["reloads"] == 0 or not report["ours"], name


@pytest.mark.parametrize(
    ("changes", "score", "call", "why"),
    [
        (dict(shared_values=False), Score(0.1), Call(), "shared values"),
        (dict(dim=512), Score(0.1), Call(), "head dims"),
        (dict(page_size=48), Score(0.1), Call(), "pages of 48"),
        (dict(dtype=torch.float32), Score(0.1), Call(), "float32"),
        (dict(quantized=True), Score(0.1), Call(), "e4m3"),
        ({}, Score(-0.1), Call(), "scale"),
        ({}, Score(0.1, alibi_slopes=torch.ones(128)), Call(), "ALiBi"),
        ({}, Score(0.1), Call(fixed_split=128), "fixed_split"),
        ({}, Score(0.1), Call(), "9.0"),
    ],
)
def test_latent_attention_refuses_what_it_does_not_have(
    changes: dict[str, Any], score: Score, call: Call, why: str
) -> None:
    from ringattn.kernels.paged import hopper_latent

    step = replace(CASE, **changes).made()
    reason = hopper_latent.unsupported(step.q, step.pools[0], step.tables(), score, call)
    assert reason is not None
    assert why in reason


@pytest.mark.parametrize(("columns", "ahead"), [(576, 2), (640, 0)])
def test_latent_attention_prefetches_only_slots_that_lie_one_after_another(
    monkeypatch: pytest.MonkeyPatch, columns: int, ahead: int
) -> None:
    from ringattn.kernels.paged import hopper_latent

    options: dict[str, Any] = {}
    monkeypatch.setattr(hopper_latent, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_latent, "combine", lambda *args: None)
    monkeypatch.setattr(hopper_latent, "dispatch", lambda *args, **more: options.update(more))
    step = CASE.made()
    k = torch.nn.functional.pad(step.pools[0].k, (0, columns - 576))[..., :576]
    pool = step.pools[0]._replace(k=k, v=k[..., :512])
    hopper_latent.launch(step.q, pool, step.tables(), Score(0.1), Call(), empty_result(step.q, pool))
    assert options["AHEAD"] == ahead


if __name__ == "__main__":
    print(json.dumps(compiled_for_hopper()))
