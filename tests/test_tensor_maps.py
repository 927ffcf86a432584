"""TMA views: a second one of the same shape is made without Triton's checks, and says the same."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.hopper import tensor_maps
from ringattn.kernels.hopper.tensor_maps import readable, view

BF16 = torch.bfloat16


def facts(made: TensorDescriptor) -> dict:
    """All that Triton made of it, but for whose it is."""
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.name != "base"}


def test_a_second_view_is_what_triton_would_make() -> None:
    first, second = torch.zeros(2, 100, 4, 64, dtype=BF16), torch.ones(2, 100, 4, 64, dtype=BF16)
    made = [view(x, (1, 64, 1, 64)) for x in (first, second)]
    assert made[0].base is first
    assert made[1].base is second
    for x, mine in zip((first, second), made, strict=True):
        assert type(mine) is TensorDescriptor
        theirs = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 64, 1, 64], mine.layout)
        assert facts(mine) == facts(theirs)
        assert mine == theirs
    assert made[0].kind == made[1].kind


@pytest.mark.parametrize("other", [
    torch.zeros(2, 100, 4, 64, dtype=torch.float16), torch.zeros(2, 101, 4, 64, dtype=BF16),
    torch.zeros(2, 100, 8, 64, dtype=BF16)[:, :, ::2], torch.zeros(4, 2, 100, 64, dtype=BF16).permute(1, 2, 0, 3),
])  # fmt: skip
def test_another_tensor_gets_a_view_of_its_own(other: torch.Tensor) -> None:
    x = torch.zeros(2, 100, 4, 64, dtype=BF16)
    for _ in range(2):
        made, mine = view(other, (1, 64, 1, 64)), view(x, (1, 64, 1, 64))
        assert (made.shape, made.strides) == (list(other.shape), list(other.stride()))
        assert (mine.shape, mine.strides) == (list(x.shape), list(x.stride()))
        assert (made.kind == mine.kind) == (other.dtype == x.dtype)  # lengths and strides compile nothing anew


def test_kinds_are_boxes_and_dtypes() -> None:
    x, rows = torch.zeros(1, 128, 2, 128, dtype=BF16), torch.zeros(8, 64)
    boxes = [(x, (1, 64, 1, 64)), (x, (1, 64, 1, 128)), (x, (1, 128, 1, 64)), (x.float(), (1, 64, 1, 64)),
             (rows, (1, 64)), (rows.int(), (1, 64))]  # fmt: skip
    assert len({view(*box).kind for box in boxes}) == len(boxes)


def test_strides_of_single_rows_are_made_ready() -> None:
    x = torch.zeros(1, 50, 3, 72, dtype=BF16)[:, :, :1, :64]
    x = x.as_strided((1, 50, 1, 64), (7, 3 * 72, 5, 1))
    assert readable(x)
    for _ in range(2):
        assert view(x, (1, 64, 1, 64)).strides == [8, 3 * 72, 8, 1]


def test_what_tma_cannot_read_is_refused_every_time() -> None:
    x = torch.zeros(1, 64, 1, 64 + 8, dtype=BF16)
    view(x[..., 8:], (1, 64, 1, 64))  # the same shape and strides
    elsewhere, narrow = x.flatten()[4:-4].as_strided((1, 64, 1, 64), x.stride()), torch.zeros(2, 64, 1, 68, dtype=BF16)
    for y, error, words in (
        (elsewhere, ValueError, "multiples of 16 bytes"), (narrow[..., :64], AssertionError, "16-byte aligned"),
        (x[..., ::2], AssertionError, "contiguous"), (x[..., :64].expand(2, 64, 1, 64), None, ""),
    ):  # fmt: skip
        assert not readable(y)
        for _ in range(2 if error else 0):
            with pytest.raises(error, match=words):
                view(y, (1, 64, 1, 64 if y.shape[-1] >= 64 else 32))


def test_no_tensor_is_kept_and_no_more_views_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_KEPT", 3)
    monkeypatch.setattr(tensor_maps, "_known", {})
    x = torch.zeros(1, 64, 1, 64, dtype=BF16)
    alive = weakref.ref(x)
    for n in (64, 128, 192, 256, 320, 384, 448):
        made = view(x.expand(1, 64, 1, 64).repeat(1, n // 64, 1, 1), (1, 64, 1, 64))
        assert made.shape[1] == n
        assert len(tensor_maps._known) <= 3
    view(x, (1, 64, 1, 64))
    del x, made
    gc.collect()
    assert alive() is None
