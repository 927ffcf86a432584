"""Change one key, one value, or one row's gradient: exactly those that may see it change, bit for bit.

A test of masks, layouts and dataflows at once that no tolerance can blunt: a row that changes and should not, or
should and does not, is a wrong mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
import suite
import torch
from cases import Case
from torch import Tensor

from ringattn import virtual

SEQ = 23
HEADS = 2


@dataclasses.dataclass(frozen=True)
class Poked(Case):
    """A case in which one row of the batch has another ``poke`` at one position."""

    poke: str = ""
    at: int = 0
    row: int = 0

    def inputs(self) -> dict[str, Tensor]:
        x = super().inputs()
        if self.poke:
            x[self.poke][self.row, self.at] += 0.5
        return x


def results(case: Poked, world_size: int) -> cases.Results:
    return cases.joined(virtual.run(world_size, lambda rank: cases.attend(case, rank)))


def changed(a: Tensor, b: Tensor, seq_dim: int) -> Tensor:
    """(batch, seq) bool: rows with any different bit (-inf equals -inf)."""
    other = [d for d in range(1, a.ndim) if d != seq_dim]
    return (a != b).any(dim=other) if other else a != b


POSITIONS = (0, 8, SEQ - 1)
ALL = [  # by default every mask once, with layouts, dataflows and positions in turns
    pytest.param(
        mask, layout, dataflow, POSITIONS if suite.LONG else (POSITIONS[(a + c) % 3],), id=f"{mask}-{layout}-{dataflow}"
    )
    for a, mask in enumerate(cases.MASKS)
    for b, layout in enumerate(cases.LAYOUTS)
    for c, dataflow in enumerate(("ring", "gather", "reduce"))
    if suite.LONG or (a % len(cases.LAYOUTS), a // len(cases.LAYOUTS) % 3) == (b, c)
]


@pytest.mark.parametrize(("mask", "layout", "dataflow", "positions"), ALL)
def test_only_rows_that_see_it_change(mask: str, layout: str, dataflow: str, positions: tuple[int, ...]) -> None:
    world_size = 3 if layout == "zigzag" else 4
    fields: dict[str, Any] = cases.MASKS[mask](SEQ, 2)
    case = Poked(
        seq_len=SEQ, **fields, layout=layout, dataflow=dataflow, q_heads=HEADS, kv_heads=1, head_dim=4, head_dim_v=4
    )
    visible = case.visible().expand(2, -1, -1)
    before = results(case, world_size)
    for at in positions:
        row, key = at % 2, min(at, case.keys - 1)
        sees = torch.zeros(2, SEQ, dtype=torch.bool)
        sees[row] = visible[row, :, key]

        after = results(dataclasses.replace(case, poke="v", at=key, row=row), world_size)
        assert torch.equal(changed(after["out"], before["out"], 1), sees)
        assert torch.equal(after["lse"], before["lse"]), "values have no part in lse"

        after = results(dataclasses.replace(case, poke="k", at=key, row=row), world_size)
        assert torch.equal(changed(after["lse"], before["lse"], 2), sees)
        others = ~sees[..., None, None].expand_as(before["out"])
        assert torch.equal(after["out"][others], before["out"][others])

        # The other way: one row's dout reaches its own dq, and dv of the keys it sees.
        seen = torch.zeros(2, case.keys, dtype=torch.bool)
        seen[row] = visible[row, at]
        after = results(dataclasses.replace(case, poke="dout", at=at, row=row), world_size)
        assert torch.equal(changed(after["dv"], before["dv"], 1), seen)
        assert torch.equal(after["dk"][~seen], before["dk"][~seen])
        elsewhere = torch.ones(2, SEQ, dtype=torch.bool)
        elsewhere[row, at] = False
        assert torch.equal(after["dq"][elsewhere], before["dq"][elsewhere])
