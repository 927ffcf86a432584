"""What all plots share: name and colour of ringattn, names of others, and labels where lines end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OURS = "ringattn"
COLOUR = "#0072B2"  # of ringattn, and of nothing else
LIMIT = "black"  # of what nothing can be faster than, dotted
OTHER_COLOURS = ("#D55E00", "#CC79A7", "#009E73", "#E69F00", "#6B7280", "#8C564B", "#BCBD22")
_WORDS = {
    "torch-cp": "PyTorch context_parallel",
    "alltoall": "all-to-all",
    "allgather": "all-gather",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "FA3": "FlashAttention-3",
    "torch SDPA": "PyTorch SDPA",
}


def shown(name: str) -> str:
    """Return the name of a contestant for people: ``torch-cp/alltoall/cudnn`` is "PyTorch context_parallel", and below
    it "all-to-all, cuDNN"."""
    library, *more = (_WORDS.get(word, word) for word in name.split("/"))
    return "\n".join([library, ", ".join(more)] if more else [library])


def label_ends(axis: Any, labels: Iterable[tuple[str, float, Any]]) -> None:
    """Write each label, in its line's colour, right of the axis at the height where the line ends; labels that would
    overlap are pushed apart. Call it when the limits of the axis are final.

    Args:
        labels: (text, y of the line's end, colour).
    """
    size = 9
    line = 1.25 * size / (axis.get_window_extent().height / axis.figure.dpi * 72)  # of the axis' height
    scale, to_axis = axis.transData, axis.transAxes.inverted()
    ends = sorted((to_axis.transform(scale.transform((axis.get_xlim()[0], y)))[1], text, c) for text, y, c in labels)
    heights = [line * (text.count("\n") + 1.15) for _, text, _ in ends]
    groups: list[tuple[float, list[int]]] = []  # where it begins, its labels: each is centred on where its lines end
    for index, (at, *_) in enumerate(ends):
        groups.append((at - heights[index] / 2, [index]))
        while len(groups) > 1 and groups[-1][0] < groups[-2][0] + sum(heights[i] for i in groups[-2][1]):
            group = groups[-2][1] + groups[-1][1]
            middle = sum(ends[i][0] for i in group) / len(group)
            groups[-2:] = [(middle - sum(heights[i] for i in group) / 2, group)]
    for low, group in groups:
        for index in group:
            _, text, colour = ends[index]
            at = low + heights[index] / 2
            axis.text(1.02, at, text, color=colour, fontsize=size, va="center", transform=axis.transAxes)
            low += heights[index]
