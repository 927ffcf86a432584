"""scripts/ranks.py: what ranks agree on when some of them are in trouble."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from pool import on_ranks

from scripts import ranks


def agreed(problems: list[str | None]) -> str | None:
    return ranks.agree(problems[dist.get_rank()])


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_every_rank_hears_the_first_one_in_trouble(pools, world_size: int) -> None:
    assert pools(world_size).run(agreed, [None] * world_size) == [None] * world_size
    assert pools(world_size).run(agreed, [None, "out of memory", "late"]) == ["rank 1: out of memory"] * world_size


def test_a_problem_is_one_line() -> None:
    assert ranks.one_line(ValueError("\nno\nand more")) == "ValueError: no"
    assert ranks.one_line(KeyboardInterrupt()) == "KeyboardInterrupt: no text"
    assert ranks.one_line("no kernel\nand more") == "no kernel"
    assert len(ranks.one_line("x" * 1000)) == 300
