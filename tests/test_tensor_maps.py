"""TMA views: a second one of the same shape skips Triton's checks and equals Triton's own."""

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
from ringattn.memo import Memo

BF16 = torch.bfloat16


def fields(view: TensorDescriptor) -> dict:
    """Return all fields of a view except its tensor."""
    return {field.name: getattr(view, field.name) for field in dataclasses.fields(view) if field.name != "base"}


def test_a_second_view_is_what_triton_would_make() -> None:
    first, second = torch.zeros(2, 100, 4, 64, dtype=BF16), torch.ones(2, 100, 4, 64, dtype=BF16)
    views = [view(x, (1, 64, 1, 64)) for x in (first, second)]
    assert views[0].base is first
    assert views[1].base is second
    for x, mine in zip((first, second), views, strict=True):
        assert type(mine) is TensorDescriptor
        theirs = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 64, 1, 64], mine.layout)
        assert fields(mine) == fields(theirs)
        assert mine == theirs
    assert views[0].kind == views[1].kind


@pytest.mark.parametrize("other", [
    torch.zeros(2, 100, 4, 64, dtype=torch.float16), torch.zeros(2, 101, 4, 64, dtype=BF16),
    torch.zeros(2, 100, 8, 64, dtype=BF16)[:, :, ::2], torch.zeros(4, 2, 100, 64, dtype=BF16).permute(1, 2, 0, 3),
])  # fmt: skip
def test_another_tensor_gets_a_view_of_its_own(other: torch.Tensor) -> None:
    x = torch.zeros(2, 100, 4, 64, dtype=BF16)
    for _ in range(2):
        another, mine = view(other, (1, 64, 1, 64)), view(x, (1, 64, 1, 64))
        assert (another.shape, another.strides) == (list(other.shape), list(other.stride()))
        assert (mine.shape, mine.strides) == (list(x.shape), list(x.stride()))
        assert (another.kind == mine.kind) == (other.dtype == x.dtype)  # lengths and strides need no other kernel


def test_kinds_are_boxes_and_dtypes() -> None:
    x, rows = torch.zeros(1, 128, 2, 128, dtype=BF16), torch.zeros(8, 64)
    boxes = [(x, (1, 64, 1, 64)), (x, (1, 64, 1, 128)), (x, (1, 128, 1, 64)), (x.float(), (1, 64, 1, 64)),
             (rows, (1, 64)), (rows.int(), (1, 64))]  # fmt: skip
    assert len({view(*box).kind for box in boxes}) == len(boxes)


def test_strides_of_dimensions_of_one_are_rounded_up() -> None:
    x = torch.zeros(1, 50, 3, 72, dtype=BF16)[:, :, :1, :64]
    x = x.as_strided((1, 50, 1, 64), (7, 3 * 72, 5, 1))
    assert readable(x)
    for _ in range(2):
        assert view(x, (1, 64, 1, 64)).strides == [8, 3 * 72, 8, 1]


def test_unreadable_tensors_are_refused_every_time() -> None:
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


def test_views_are_bounded_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_fields_of_views", Memo(3))
    x = torch.zeros(1, 64, 1, 64, dtype=BF16)
    alive = weakref.ref(x)
    for n in (64, 128, 192, 256, 320, 384, 448):
        another = view(x.expand(1, 64, 1, 64).repeat(1, n // 64, 1, 1), (1, 64, 1, 64))
        assert another.shape[1] == n
        assert len(tensor_maps._fields_of_views) <= 3
    view(x, (1, 64, 1, 64))
    del x, another
    gc.collect()
    assert alive() is None
