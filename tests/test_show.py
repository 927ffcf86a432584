"""scripts/show.py: its pictures agree with the plan."""

from __future__ import annotations

import pytest
import torch

import ringattn
from ringattn import mask as masks
from ringattn.layouts.shards import LAYOUTS, positions
from ringattn.virtual import VirtualRank
from scripts import show


def walk(layout: str, seq_len: int = 16, ranks: int = 4, **options) -> show.Walk:
    return show.walk(ringattn.plan(seq_len, VirtualRank(0, ranks), layout=layout, **options))


def test_causal_work_per_step():
    # Four tokens per rank: a rank's own shard is a triangle of 10 cells, a whole shard 16, half of one 8.
    triangle, whole, half, n = 10, 16, 8, 0
    contiguous, zigzag = walk("contiguous", causal=True), walk("zigzag", causal=True)
    assert contiguous.work == [
        [triangle, n, n, n],
        [triangle, whole, n, n],
        [triangle, whole, whole, n],
        [triangle, whole, whole, whole],
    ]
    assert zigzag.work == [[triangle, half, half, half]] * 4
    assert (contiguous.time, zigzag.time) == (10 + 3 * 16, 10 + 3 * 8)
    assert contiguous.idle == pytest.approx(1 - 136 / (4 * 58))
    assert zigzag.idle == 0
    assert contiguous.hops == zigzag.hops == 3


def test_a_gather_waits_at_the_end_only():
    travels, gathered = (walk("zigzag", 64, 4, window_size=(8, 0), dataflow=d) for d in ("ring", "gather"))
    assert gathered.work == travels.work
    sums = [sum(w) for w in gathered.work]
    assert gathered.time == max(sums) < travels.time
    for rank in range(4):
        segments = gathered.segments(rank)
        assert sum(end - begin - own for begin, own, end in segments[:-1]) == 0
        assert segments[-1][2] - segments[-1][0] - segments[-1][1] == max(sums) - sums[rank]


def test_a_window_of_one_shard_needs_one_hop():
    result = walk("contiguous", 64, 8, window_size=(8, 0))
    assert result.hops == 1
    assert [len(w) for w in result.work] == [2] * 8


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dataflow", ["ring", "reduce", "gather"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (5, 2)},
        {"causal": True, "cu_seqlens": [0, 3, 11, 26]},
        {"causal": True, "prefix": 7},
        {"causal": True, "local_size": 2},
        {"mask": masks.tree([-1, 0, 0], [11, 9, 6])},
    ],
    ids=lambda o: "-".join(o) or "full",
)
def test_every_visible_cell_is_drawn_at_its_step(layout, dataflow, options):
    result = walk(layout, 26, 4, dataflow=dataflow, **options)
    grid, sizes = show.cells(result, 26)  # all tokens
    order = torch.cat([positions(s) for s in result.plan.shards])
    assert sizes == list(result.plan.local_lengths)
    assert torch.equal(grid != show.HIDDEN, result.plan.mask.dense()[0][order][:, order])
    for step, works in enumerate(zip(*result.work, strict=True)):
        assert int((grid == step).sum()) == sum(works)
    holder = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    moving = holder[None, :] if dataflow != "reduce" else holder[:, None]  # step 0: each rank's own shard
    staying = holder[:, None] if dataflow != "reduce" else holder[None, :]
    assert (moving == staying)[grid == 0].all()
    assert (grid == 0).any()


def test_a_sample_keeps_the_proportions():
    result = walk("zigzag", 4096, causal=True)
    grid, sizes = show.cells(result, 32)
    assert sizes == [32] * 4
    assert (grid != show.HIDDEN).double().mean().item() == pytest.approx(0.5, abs=0.01)


def output(capsys, monkeypatch, *arguments: str, columns: int = 100) -> str:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_terminal_shows_why_zigzag_is_balanced(capsys, monkeypatch):
    text = output(capsys, monkeypatch, "--seq-len", "16")
    lines = text.splitlines()
    assert "contiguous: 41% idle" in text
    assert "zigzag: 0% idle" in text
    assert any("3333│2222│1111│0···" in line and "33··│22··│11··│0···" in line for line in lines)  # rank 3
    assert any("contiguous" in line and line.split()[1:] == ["0", "10*", "0", "0", "0", "10"] for line in lines)
    assert any(line.split() == ["3", "10*", "16*", "16*", "16*", "58"] for line in lines)
    assert "zigzag takes 59% of the time of contiguous" in text
    assert "\x1b" not in text  # no control characters when piped


def test_bars_are_as_long_as_the_work(capsys, monkeypatch):
    text = output(capsys, monkeypatch, "--layout", "contiguous", "--seq-len", "16", columns=72)  # 58 characters wide
    bars = [line.split()[2] for line in text.splitlines() if line.startswith("  rank ")]
    assert bars[0] == "0" * 10 + "░" * 48
    assert bars[2] == "0" * 10 + "1" * 16 + "2" * 16 + "░" * 16
    assert bars[3] == "0" * 10 + "1" * 16 + "2" * 16 + "3" * 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--mask full", "Full, 4,096"),
        ("--mask window --window 512", "Window of 512 keys before each query"),
        ("--mask documents --documents 1,1,2", "Causal in 3 packed documents"),
        ("--mask prefix --prefix 100", "prefix of 100"),
        ("--mask chunk --size 256", "Causal in chunks of 256"),
        ("--mask blocks --size 256", "Block-causal in blocks of 256"),
        ("--spans 3,1,2,1", "Causal with 2 spans"),
        ("--tree 2,1,1", "A prompt with 2 answers"),
        ("--mask sinks --size 300", "Window of 300 keys before each query and 4 sinks"),
        ("--mask diffusion", "Block diffusion in blocks of 256"),
        ("--ranks 8 --local-size 4 --layout zigzag", "rings of 4"),
        ("--ranks 12 --layout striped --dataflow reduce", "12 ranks"),
        ("--ranks 3 --seq-len 2", "2 tokens over 3 ranks"),
        ("--ranks 1", "1 ranks"),
        ("--window 512,8", "Window of 512 keys before and 8 after"),
        ("--prefix 100", "prefix of 100"),
        ("--ranks 40", "(squares, bars and steps of 40 ranks are wider"),
    ],
)
def test_arguments(arguments, text, capsys, monkeypatch):
    assert text in output(capsys, monkeypatch, *arguments.split())


def planned(arguments: str) -> ringattn.Plan:
    (plan,), _ = show.plans(show.parse([*arguments.split(), "--layout", "zigzag"]))
    return plan


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ("--mask chunk", masks.chunked(64, 4) & masks.causal(64)),
        ("--mask blocks --size 9", masks.blocks(64, 9)),
        ("--mask spans", masks.spans([(8, 24), (32, 48)], 64)),
        ("--mask tree", masks.tree([-1, 0, 0, 0, 0], [32, 8, 8, 8, 8])),
        ("--mask sinks --size 7", masks.sinks(64, 4, 7)),
        ("--mask diffusion", masks.block_diffusion(32, 4)),
    ],
)
def test_masks_are_those_of_their_names(arguments: str, mask: masks.Mask) -> None:
    assert torch.equal(planned(f"--seq-len 64 {arguments}").mask.dense(), mask.dense())


def test_documents_are_proportions_of_the_sequence():
    plan = planned("--ranks 2 --seq-len 80 --documents 3,1,4")
    total = sum(plan.visible(q, k) for q in range(2) for k in range(2))
    assert total == sum(n * (n + 1) // 2 for n in (30, 10, 40))


def test_nothing_is_cut_off_and_no_difference_is_none(capsys, monkeypatch):
    assert "…" not in output(capsys, monkeypatch, "--ranks", "40")
    assert "…" not in output(capsys, monkeypatch, "--ranks", "20")
    assert "of the time of" not in output(capsys, monkeypatch, "--mask", "full")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--local-size 3", "divide"),
        ("--dataflow magic", "magic"),
        ("--mask documents --documents 0,0", "proportions"),
        ("--ranks 0", "--ranks 0: pass at least 1"),
        ("--window 1,2,3", "--window 1,2,3: pass LEFT or LEFT,RIGHT"),
        ("--mask tree --tree 0,0", "--tree 0,0: pass positive lengths or proportions"),
        ("--documents 1,x", "--documents 1,x: pass positive lengths"),
        ("--mask tree --size 4", "--size goes with --mask chunk, blocks, sinks or diffusion, not with tree"),
        ("--mask diffusion --seq-len 5", "--seq-len 5: pass an even number"),
        ("--mask chunk --size 0", "size is 0"),
        ("--mask full --prefix 3", "--prefix goes with --mask prefix, not with full"),
        ("--png /dev/null/show.png", "error: --png /dev/null/show.png: "),
    ],
)
def test_mistakes(arguments, text, capsys):
    assert show.main(arguments.split()) == 1
    assert text in capsys.readouterr().err


def test_the_picture_has_the_colour_of_every_step(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    show.draw(tmp_path / "show.png", [walk(layout, causal=True) for layout in LAYOUTS], "Causal")
    pixels = image.imread(tmp_path / "show.png")[..., :3]
    for colour in show.colours(4)[:4]:
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels - rgb).max(-1) < 0.02).mean() > 0.01, colour
