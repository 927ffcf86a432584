"""Mutation tests: plant one small fault at a time, and see that tests fail.

    python -m tests.mutants                     all that need no GPU, and a table; some 20 minutes on two cores
    python -m tests.mutants --only mask ring    mutants whose name contains one of these words
    python -m tests.mutants --gpu               those that only a Hopper GPU can show

Every mutant replaces one piece of text in one file of a copy of the repository, and runs the tests that should notice.
It is *caught* if a test fails, or if the tests exceed their time, which a fault that hangs does. If they pass, it
*survived*: there is a hole in the tests. The exit status is 0 only if all are caught. tests/test_mutants.py keeps the
list in step with the code. Method: DeMillo, Lipton, Sayward 1978, "Hints on test data selection".
"""

# ruff: noqa: E501  (lines of other files are quoted whole)
from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m tests.mutants")

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 240  # for the tests of one mutant, which take less than a minute without a fault


class Mutant(NamedTuple):
    """A fault: ``old`` occurs once in ``file`` and is replaced by ``new``.

    ``tests``: arguments of pytest that choose the tests which should notice. ``gpu``: they need a Hopper GPU.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    gpu: bool = False

    def planted(self, root: Path = ROOT) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the text to replace is not there exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}; it must be once")
        return text.replace(self.old, self.new)


_MASK = "tests/test_mask.py"
_STATE = "tests/test_partial.py"
_EAGER = "tests/test_eager.py tests/test_kernel_contract.py"
_TRITON = "tests/test_kernel_contract.py tests/test_triton.py"
_FLOWS = "tests/test_dataflows.py"
_COPIES = "tests/test_pulls.py tests/test_extend.py"
_PLAN = "tests/test_plan.py tests/test_schedule.py"
_BATCH = "tests/test_batch.py"

MUTANTS = (
    # --- masks and layouts
    Mutant(
        "mask: causal hides the own key",
        "ringattn/masks/intervals.py",
        "aligned + right + 1).clamp",
        "aligned + right).clamp",
        _MASK,
    ),
    Mutant(
        "mask: window one key too long",
        "ringattn/masks/intervals.py",
        "torch.maximum(low, aligned - left).clamp",
        "torch.maximum(low, aligned - left - 1).clamp",
        _MASK,
    ),
    Mutant(
        "mask: aligned at the beginning",
        "ringattn/masks/intervals.py",
        "return self.seq_len_k - self.seq_len",
        "return 0",
        _MASK,
    ),
    Mutant(
        "mask: intersection forgets one side's low",
        "ringattn/masks/intervals.py",
        "torch.maximum(x[0], y[0])",
        "x[0]",
        _MASK,
    ),
    Mutant(
        "mask: intersection takes the longer window",
        "ringattn/masks/intervals.py",
        "torch.minimum(x[2], y[2])",
        "torch.maximum(x[2], y[2])",
        _MASK,
    ),
    Mutant(
        "mask: overlapping members are accepted",
        "ringattn/masks/intervals.py",
        "shared = (low < high).nonzero()",
        "shared = (low < high - 1).nonzero()",
        _MASK,
    ),
    Mutant(
        "mask: piece of the query before",
        "ringattn/masks/intervals.py",
        "piece = torch.searchsorted(first, positions.contiguous(), right=True) - 1",
        "piece = (torch.searchsorted(first, positions.contiguous()) - 1).clamp(min=0)",
        _MASK,
    ),
    Mutant(
        "mask: digest leaves out the right bounds",
        "ringattn/masks/intervals.py",
        "for x in (m.first, m.low, m.high, m.left, m.right):",
        "for x in (m.first, m.low, m.high, m.left):",
        _MASK,
    ),
    Mutant(
        "mask: digest leaves out the lengths",
        "ringattn/masks/intervals.py",
        'f"{m.seq_len} {m.seq_len_k} {tuple(m.first.shape)}"',
        'f"{tuple(m.first.shape)}"',
        _MASK,
    ),
    Mutant(
        "mask: digest of the first member only",
        "ringattn/masks/intervals.py",
        "for m in self.members:\n            h.update(f",
        "for m in self.members[:1]:\n            h.update(f",
        _MASK,
    ),
    Mutant(
        "mask: falling ends are accepted",
        "ringattn/masks/intervals.py",
        "falls = (bound.diff(dim=1) < 0).nonzero()\n            if",
        "falls = (bound.diff(dim=1) < -bound.numel()).nonzero()\n            if",
        _MASK + " tests/test_extend.py",
    ),
    Mutant(
        "mask: runs seen end one early",
        "ringattn/masks/intervals.py",
        "last = torch.minimum(past + self.offset, high + left) - 1",
        "last = torch.minimum(past + self.offset, high + left) - 2",
        _MASK,
    ),
    Mutant(
        "layout: zigzag pairs with the wrong chunk",
        "ringattn/layouts/shards.py",
        "_runs(chunks[r], chunks[-1 - r])",
        "_runs(chunks[r], chunks[(r + world_size) % (2 * world_size)])",
        "tests/test_layout.py",
    ),
    Mutant(
        "layout: put forgets the step",
        "ringattn/layouts/shards.py",
        "index[dim] = slice(r.start, r.stop, r.step)",
        "index[dim] = slice(r.start, r.start + len(r))",
        "tests/test_layout.py tests/test_attention.py -k shard",
    ),
    Mutant(
        "needs: a part begins one key late",
        "ringattn/layouts/needs.py",
        "return [(run[first:past], owner, offset + first)]",
        "return [(run[first:past], owner, offset + first + (first > 0))]",
        "tests/test_plan.py tests/test_extend.py",
    ),
    # --- states
    Mutant(
        "partial: rescale leaves l",
        "ringattn/partial.py",
        "return Partial(m, self.l * factor, self.o",
        "return Partial(m, self.l, self.o",
        _STATE,
    ),
    Mutant(
        "partial: add_ drops the other's factor",
        "ringattn/partial.py",
        "self.l.mul_(scale).add_(other.l.mul_(other_scale))",
        "self.l.mul_(scale).add_(other.l)",
        _STATE,
    ),
    Mutant("partial: lse without ln l", "ringattn/partial.py", "self.m + torch.log(l), float", "self.m, float", _STATE),
    Mutant(
        "partial: a row that saw nothing divides by zero",
        "ringattn/partial.py",
        "l = torch.where(seen, self.l, 1.0)",
        "l = self.l",
        _STATE,
    ),
    Mutant(
        "partial: empty plus empty is NaN",
        "ringattn/partial.py",
        'factor = torch.exp(self.m - torch.where(m == float("-inf"), 0.0, m))',
        "factor = torch.exp(self.m - m)",
        _STATE,
    ),
    Mutant(
        "partial: the sink counts twice",
        "ringattn/partial.py",
        "torch.ones_like(self.l), torch.zeros_like(self.o))",
        "2 * torch.ones_like(self.l), torch.zeros_like(self.o))",
        _STATE,
    ),
    # --- eager kernel
    Mutant(
        "eager: no rescale of o",
        "kernels/eager.py",
        "o[:, rows] = o[:, rows] * _per_row(alpha) +",
        "o[:, rows] = o[:, rows] +",
        _EAGER,
    ),
    Mutant(
        "eager: full tiles begin one tile early",
        "kernels/eager.py",
        "if full_begin[tile] <= col and",
        "if full_begin[tile] <= col + _BLOCK and",
        _EAGER + " " + _FLOWS,
    ),
    Mutant(
        "eager: softcap without its derivative",
        "kernels/eager.py",
        "s, slope = score.softcap * t, 1 - t * t",
        "s, slope = score.softcap * t, 1.0",
        _EAGER,
    ),
    Mutant(
        "eager: ALiBi is signed",
        "kernels/eager.py",
        "positions_k[None, cols]).abs()",
        "positions_k[None, cols])",
        _EAGER,
    ),
    Mutant(
        "eager: sink joins every chunk",
        "kernels/eager.py",
        "if score.sink is not None and state is None:",
        "if score.sink is not None:",
        _EAGER,
    ),
    Mutant(
        "eager: dk without the scale",
        "kernels/eager.py",
        "dk[:, cols] += _over_group(ds,",
        "dk[:, cols] += _over_group(ds / score.softmax_scale,",
        _EAGER,
    ),
    Mutant("eager: dq is overwritten", "kernels/eager.py", "dq[:, rows] += _grouped", "dq[:, rows] = _grouped", _EAGER),
    Mutant(
        "eager: heads of a group read the wrong keys",
        "kernels/eager.py",
        "folded = x.reshape(batch, kv_heads, q_heads // kv_heads * m, a)",
        "folded = x.reshape(batch, q_heads // kv_heads, kv_heads, m, a).transpose(1, 2).reshape(batch, kv_heads, -1, a)",
        _EAGER,
    ),
    Mutant(
        "eager: empty rows are NaN in the backward",
        "kernels/eager.py",
        '    lse = torch.where(lse == float("-inf"), float("inf"), lse)  # rows',
        "    # rows",
        _EAGER,
    ),
    Mutant(
        "delta: the gradient of lse has the wrong sign",
        "kernels/delta.py",
        "        delta -= dlse.to(delta.dtype)\n",
        "        delta += dlse.to(delta.dtype)\n",
        _EAGER + " tests/test_attention.py",
    ),
    Mutant(
        "begin: dq is not zero",
        "kernels/triton/begin.py",
        "tl.zeros([ROWS, DIM_P2], tl.float32)",
        "tl.full([ROWS, DIM_P2], 1.0, tl.float32)",
        "tests/test_delta.py",
    ),
    Mutant(
        "begin: delta for the kernels has the wrong sign",
        "kernels/triton/begin.py",
        "tl.store(minus_delta + head * rows + row, -sums",
        "tl.store(minus_delta + head * rows + row, sums",
        "tests/test_delta.py",
    ),
    Mutant(
        "hopper forward: a consumer leaves out the first keys of its rows",
        "kernels/hopper/forward_consumer.py",
        "gl.maximum(first // BN * BN, begin)",
        "gl.maximum((first + BN - 1) // BN * BN, begin)",
        "tests/test_hopper_forward.py -k spans_of_consumers",
    ),
    Mutant(
        "hopper forward: a consumer waits for the next query tile before it has passed its turns in this one",
        "kernels/hopper/forward_consumer.py",
        "        if OWN_SPAN:  # the producer announces",
        "        mbarrier.wait(info_full.index(i % SLOTS), (i // SLOTS) & 1)\n        if OWN_SPAN:  # the producer announces",
        "tests/test_hopper_protocol.py -k documents",
    ),
    Mutant(
        "hopper forward: a consumer releases values before their product is complete",
        "kernels/hopper/forward_consumer.py",
        "    acc, p = warpgroup_mma_wait(0, deps=[acc, p])\n    keep_alive(packed)\n    barrier_arrive(V_FREE + vs, THREADS)\n",
        "    barrier_arrive(V_FREE + vs, THREADS)\n    acc, p = warpgroup_mma_wait(0, deps=[acc, p])\n    keep_alive(packed)\n",
        "tests/test_hopper_protocol.py -k full",
    ),
    Mutant(
        "hopper forward: queries that see nothing count where few keys are looked for",
        "kernels/hopper/work.py",
        "max(1, int(keys.count_nonzero()))",
        "keys.numel()",
        "tests/test_hopper_forward.py -k where_a_cta_has_one_consumer",
    ),
    Mutant(
        "hopper forward: other documents compile the other configuration",
        "kernels/hopper/forward.py",
        "    if dims in NARROW:\n        other",
        "    if not dims:\n        other",
        "tests/test_new_documents.py -k compile",
    ),
    Mutant(
        "hopper forward: a consumer hides nothing of a key tile that one row sees half of",
        "kernels/hopper/forward_consumer.py",
        "gl.maximum(full_end // BN * BN, full_begin)",
        "gl.maximum((full_end + BN - 1) // BN * BN, full_begin)",
        "tests/test_hopper_forward.py -k spans_of_consumers",
    ),
    Mutant(
        "hopper backward: says that dQ is staged where nothing is",
        "kernels/hopper/backward_tall.py",
        "        if i > begin:\n            barrier_arrive(DQ_STAGED",
        "        if i > -1:\n            barrier_arrive(DQ_STAGED",
        "tests/test_hopper_backward_protocol.py -k short",
    ),
    Mutant(
        "hopper backward: V of the next program before this one has used its own",
        "kernels/hopper/backward_tall.py",
        "            if g >= 1:\n                barrier_sync(DO_FREE + 1 - stage, LOADERS, warps=1)  # for dO of the next step\n"
        "            if (i == 0) & (n > 0):\n                pieces.load_v(descs, tiles, tiles.programs.v_full.index(0), at, "
        "first)\n",
        "            if (i == 0) & (n > 0):\n                pieces.load_v(descs, tiles, tiles.programs.v_full.index(0), at, "
        "first)\n"
        "            if g >= 1:\n                barrier_sync(DO_FREE + 1 - stage, LOADERS, warps=1)  # for dO of the next step\n",
        "tests/test_hopper_backward_protocol.py -k causal",
    ),
    Mutant(
        "hopper backward: takes two programs at the end of a short one",
        "kernels/hopper/backward_tall.py",
        "        if not early:\n            program = take(",
        "        if True:\n            program = take(",
        "tests/test_hopper_backward_protocol.py -k short",
    ),
    Mutant(
        "hopper backward: cut tiles are not masked",
        "kernels/hopper/backward_tall.py",
        "s, dk, dv = _walk(C, True, i, full, i, last, n,",
        "s, dk, dv = _walk(C, False, i, full, i, last, n,",
        "tests/test_hopper_backward_protocol.py -k causal",
    ),
    Mutant(
        "hopper backward: the work counter does not end at zero",
        "kernels/hopper/backward_tall.py",
        "        announce(tiles.programs, n, program, total)\n\n",
        "        announce(tiles.programs, n, program, total)\n    take(grid, total, WAIT)\n\n",
        "tests/test_hopper_backward_protocol.py -k short",
    ),
    Mutant(
        "hopper backward: waits for its first program when other CTAs have taken all",
        "kernels/hopper/backward_tall.py",
        "        s = _first_scores(C, program >= 0, 0, 0,",
        "        s = _first_scores(C, True, 0, 0,",
        "tests/test_hopper_backward_protocol.py -k may_come",
    ),
    Mutant(
        "hopper backward: announces a program before its number is there",
        "kernels/hopper/backward_programs.py",
        "    programs.numbers.index(n % SLOTS).store(number)\n    mbarrier.arrive(programs.full.index(n % SLOTS), count=1)\n",
        "    mbarrier.arrive(programs.full.index(n % SLOTS), count=1)\n    programs.numbers.index(n % SLOTS).store(number)\n",
        "tests/test_hopper_backward_protocol.py -k documents",
    ),
    Mutant(
        "hopper backward: hides by the queries that see the other half of the keys",
        "kernels/hopper/backward_pieces.py",
        "_described(grid, at.batch, at.tile) * 2 + half\n",
        "_described(grid, at.batch, at.tile) * 2 + 1 - half\n",
        "tests/test_hopper_backward_protocol.py -k documents",
    ),
    Mutant(
        "hopper backward: keys past the last one of a tile are seen",
        "kernels/hopper/work.py",
        "    of_tiles = torch.where(inside, of_tiles, 0)",
        "    of_tiles = torch.where(inside | True, of_tiles, 0)",
        "tests/test_hopper_backward.py -k tables_name",
    ),
    Mutant(
        "hopper backward: key tiles of short documents all most work first",
        "kernels/hopper/work.py",
        "        if run:\n",
        "        if not run:\n",
        "tests/test_hopper_backward.py -k tables_name",
    ),
    Mutant(
        "plans: shards of another plan are no reason to warn",
        "ringattn/plans.py",
        "                split_by.warn_of_another(self)\n",
        "                pass\n",
        "tests/test_split_by.py",
    ),
    Mutant(
        "plans: a warning although a plan was asked for its positions",
        "ringattn/plans.py",
        '        self._note_split()\n        return self.once("positions",',
        '        return self.once("positions",',
        "tests/test_split_by.py",
    ),
    Mutant(
        "losses: sums of different calls are added up",
        "ringattn/training/loss.py",
        "    transport.begin(call, timeout=",
        "    (lambda *_, **__: None)(call, timeout=",
        "tests/test_lockstep.py -k losses",
    ),
    Mutant(
        "losses: running attention gets another time limit",
        "ringattn/training/loss.py",
        "timeout=transport.timeout",
        "timeout=None",
        "tests/test_loss.py -k time_limit",
    ),
    Mutant(
        "losses: the group goes on after a sum that failed",
        "ringattn/training/loss.py",
        "        transport.note_failure(error)\n",
        "",
        "tests/test_loss.py -k failed",
    ),
    Mutant(
        "launch: variants are not compiled with the first launch",
        "kernels/launch.py",
        "for changes in ({}, *variants):",
        "for changes in ({},):",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "launch: threads that need the same kernel all compile it",
        "kernels/compile_together.py",
        "    with _one_caller, filters:\n",
        "    with filters:\n",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "launch: compiling in threads changes the filters of warnings",
        "kernels/compile_together.py",
        "    with _one_caller, filters:\n",
        "    with _one_caller:\n",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "launch: what compiled next to a kernel that does not is forgotten",
        "kernels/launch.py",
        "        if isinstance(compiled, Exception) or compiled is None:\n            continue\n",
        "        if isinstance(compiled, Exception):\n            raise compiled\n",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "launch: a kernel is looked up again after it has compiled",
        "kernels/launch.py",
        "        found[key] = _compiled.put(key, (compiled, values))\n",
        "        _compiled.put(key, (compiled, values))\n        found[key] = _compiled.get(key)\n",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "launch: an interrupt waits for queued compilations",
        "kernels/compile_together.py",
        "cancel_futures=True",
        "cancel_futures=False",
        "tests/test_compile_together.py",
    ),
    Mutant(
        "doctor: processes that report steps are ended while they compile",
        "ringattn/tools/doctor.py",
        "                    end, said = min(time.monotonic() + limit, deadline), size\n",
        "                    said = size\n",
        "tests/test_doctor.py -k report_steps",
    ),
    Mutant(
        "hopper backward: gradients count as complete in another order than that of the launch",
        "kernels/hopper/backward.py",
        "work.order_of_programs(q, k, v, block, split).sweep // split.parts)",
        "work.sweep(k.shape[0] * k.shape[2], sum(tiles), 132, split.parts) // split.parts)",
        "tests/test_hopper_backward.py -k counted_gradients_have",
    ),
    Mutant(
        "hopper backward: by position although the queries do not stay in L2",
        "kernels/hopper/work.py",
        "if in_use(n) <= NEAR_IN_L2]",
        "if in_use(n)]",
        "tests/test_hopper_backward.py -k short_documents",
    ),
    Mutant(
        "hopper backward: by position although keys arrive head by head",
        "kernels/hopper/work.py",
        "    if block.seq_k > block.seq_q:\n        return usual\n",
        "",
        "tests/test_hopper_backward.py -k other_ranks",
    ),
    Mutant(
        "hopper backward: a head at a time although the lengths of documents differ",
        "kernels/hopper/work.py",
        "    if unequal and ",
        "    if False and ",
        "tests/test_hopper_backward.py -k end_together",
    ),
    Mutant(
        "hopper backward: as many parts of a group as for equal documents",
        "kernels/hopper/work.py",
        "for p in affordable if p >= usual.parts)",
        "for p in ())",
        "tests/test_hopper_backward.py -k few_groups",
    ),
    Mutant(
        "hopper backward: parts are apart although their keys come from other ranks",
        "kernels/hopper/work.py",
        " and k.shape[1] <= q.shape[1])",
        ")",
        "tests/test_hopper_backward.py -k compiled_ahead",
    ),
    Mutant(
        "hopper backward: parts of one row of a batch",
        "kernels/hopper/work.py",
        "rows = k.shape[2] * k.shape[0] // len(steps)",
        "rows = k.shape[2]",
        "tests/test_hopper_backward.py -k rows_of_a_batch",
    ),
    Mutant(
        "hopper backward: parts apart that no launch has compiled",
        "kernels/hopper/work.py",
        "if few and ctas <= MOST_APART * processors(q) else None",
        "if ctas <= MOST_APART * processors(q) else None",
        "tests/test_hopper_backward.py -k compiled_ahead",
    ),
    Mutant(
        "hopper backward: sums of parts cost nothing",
        "kernels/hopper/work.py",
        "return max(mean, last) + LATE * last + waited_for * sums",
        "return last",
        "tests/test_hopper_backward.py -k end_together_anyway",
    ),
    Mutant(
        "hopper backward: groups complete in the middle of a sweep",
        "kernels/hopper/work.py",
        "rows % n == 0 and (n % parts == 0 or parts % n == 0)",
        "rows % n == 0",
        "tests/test_hopper_backward.py -k whole_groups",
    ),
    Mutant(
        "hopper forward: two groups of heads come last although the lengths of documents differ",
        "kernels/hopper/forward_work.py",
        "math.ceil(COVER * longest / group)",
        "2",
        "tests/test_hopper_forward.py -k unequal_documents",
    ),
    Mutant(
        "hopper forward: waits for the keys of all heads where lengths of documents differ",
        "kernels/hopper/forward_work.py",
        "groups // 2 if arriving else groups",
        "groups",
        "tests/test_hopper_forward.py -k wait_for_the_last_keys",
    ),
    Mutant(
        "memo: None is made again and again",
        "ringattn/memo.py",
        "return self.put(key, make()) if result is _ABSENT else result",
        "return self.put(key, make()) if result in (_ABSENT, None) else result",
        "tests/test_memo.py",
    ),
    Mutant(
        "hopper backward: a sweep by position with a part of a group",
        "kernels/hopper/work.py",
        "heads + 1) if heads % n == 0 and n % split.parts == 0)\n    fitting",
        "heads + 1) if heads % n == 0)\n    fitting",
        "tests/test_hopper_backward.py -k whole_groups",
    ),
    Mutant(
        "hopper backward: does not wait for the pass before it",
        "kernels/hopper/backward_pieces.py",
        "    wait_for_launch_before()  # which",
        "    # which",
        "tests/test_hopper_backward.py",
    ),
    Mutant(
        "contract: full tiles reach one tile too far",
        "kernels/contract.py",
        "full_end = torch.minimum(full_end // size * size, stop)",
        "full_end = torch.minimum((full_end + size - 1) // size * size, stop)",
        _EAGER,
    ),
    Mutant(
        "contract: key tiles begin one query late",
        "kernels/contract.py",
        "begin = torch.searchsorted(end, first, right=True)",
        "begin = torch.searchsorted(end, past, right=True)",
        _TRITON,
    ),
    Mutant(
        "contract: no flush of long sums",
        "kernels/contract.py",
        "return PERIOD if keys > LONGEST_SUM else 0",
        "return 0",
        "tests/test_long_sums.py tests/test_triton.py",
    ),
    Mutant(
        "contract: slices of sinks for the wrong heads",
        "kernels/contract.py",
        "None if self.sink is None else self.sink[heads]",
        "None if self.sink is None else self.sink[: heads.stop - heads.start]",
        "tests/test_extend.py tests/test_heads.py",
    ),
    Mutant(
        "contract: slices of slopes for the wrong heads",
        "kernels/contract.py",
        "self.alibi_slopes[..., heads]",
        "self.alibi_slopes[..., : heads.stop - heads.start]",
        "tests/test_extend.py tests/test_heads.py",
    ),
    # --- Triton kernels, in the interpreter
    Mutant(
        "triton: the wrong key head",
        "kernels/triton/forward.py",
        "h_kv = h // HEADS_PER_KV",
        "h_kv = h % (heads // HEADS_PER_KV)",
        _TRITON,
    ),
    Mutant(
        "triton: carried state keeps its factor",
        "kernels/triton/forward.py",
        "        l *= factor\n        o *= factor[:, None]\n",
        "        o *= factor[:, None]\n",
        "tests/test_triton.py",
    ),
    Mutant(
        "triton: state leaves without its factor",
        "kernels/triton/forward.py",
        "l * factor, mask=alive)",
        "l, mask=alive)",
        "tests/test_triton.py",
    ),
    Mutant(
        "triton: the end of the interval is seen",
        "kernels/triton/forward.py",
        "nth[None, :] < (end - n)[:, None]",
        "nth[None, :] <= (end - n)[:, None]",
        _TRITON,
    ),
    Mutant(
        "triton: flushed sums are not rescaled",
        "kernels/triton/forward.py",
        "flushed = flushed * kept[:, None] + o",
        "flushed = flushed + o",
        "tests/test_triton.py",
    ),
    Mutant(
        "triton: dq without what was there",
        "kernels/triton/backward.py",
        "earlier + dq * softmax_scale",
        "dq * softmax_scale",
        _TRITON,
    ),
    Mutant(
        "triton: dkdv takes the first head of a group",
        "kernels/triton/backward.py",
        "h = h_kv * HEADS_PER_KV + g",
        "h = h_kv * HEADS_PER_KV",
        _TRITON,
    ),
    Mutant(
        "triton: backward with delta added",
        "kernels/triton/backward.py",
        "ds = p * (dp - delta_m[None, :])",
        "ds = p * (dp + delta_m[None, :])",
        _TRITON,
    ),
    Mutant(
        "triton: softcap's derivative left out",
        "kernels/triton/primitives.py",
        "slope_of_score = 1 - t * t",
        "slope_of_score = 1 - 0 * t",
        _TRITON,
    ),
    Mutant(
        "triton: rest of the base-2 reference",
        "kernels/triton/primitives.py",
        "rest = tl.fma(m, -LOG2E, m2) - m * LOG2E_REST",
        "rest = tl.fma(m, -LOG2E, m2) * 0",
        "tests/test_triton.py -k drift",
        gpu=True,  # the interpreter rounds the product of a fused multiply-add
    ),
    Mutant(
        "hopper: keys are divided where bits must not depend on other rows",
        "kernels/hopper/forward_work.py",
        "if block.ordered or block.start.is_cuda or worth >= 1.0:",
        "if block.start.is_cuda or worth >= 1.0:",
        "tests/test_hopper_forward.py -k query_tiles_that_differ",
    ),
    Mutant(
        "hopper: keys are divided of query tiles that differ",
        "kernels/hopper/forward_work.py",
        "if len(key_tiles) != 1:",
        "if not key_tiles:",
        "tests/test_hopper_forward.py -k query_tiles_that_differ",
    ),
    Mutant(
        "hopper: softcap takes a polynomial for numbers above its limit",
        "kernels/hopper/softcap_ptx.py",
        "_first_allowed(ways, 'm0', body, 1, '')",
        "_first_allowed(ways, 'm0', body, 2, '')",
        "tests/test_hopper_scores.py -k piece_of_assembly",
    ),
    Mutant(
        "hopper: softcap does not look at every third square",
        "kernels/hopper/softcap_ptx.py",
        "for part in parts[2:])",
        "for part in parts[3:])",
        "tests/test_hopper_scores.py -k piece_of_assembly",
    ),
    Mutant(
        "hopper: the derivative of small scores with softcap is one",
        "kernels/hopper/softcap_ptx.py",
        "-0.9851890327562914)",
        "-0.0)",
        "tests/test_hopper_scores.py -k piece_of_assembly",
    ),
    Mutant(
        "hopper: descending key tiles wait for one turn more",
        "kernels/hopper/work.py",
        "ends[:, 1] -= 1",
        "ends[:, 1] -= 0",
        "tests/test_hopper_backward.py -k take_turns",
    ),
    Mutant(
        "hopper: key tiles that no query sees count as turns",
        "kernels/hopper/work.py",
        "seen = (end > begin).to(counts.dtype)",
        "seen = (end >= begin).to(counts.dtype)",
        "tests/test_hopper_backward.py -k take_turns",
    ),
    Mutant(
        "hopper: descending keys meet queries from the last to the first",
        "kernels/hopper/backward_pieces.py",
        "gl.where(descend, 1, -1)",
        "gl.where(descend, -1, 1)",
        "tests/test_hopper_backward.py -k take_turns",
    ),
    Mutant(
        "hopper: keys descend where their queries do not fit into L2",
        "kernels/hopper/work.py",
        " and unequal and in_use(n) <= IN_L2]",
        " and unequal]",
        "tests/test_hopper_backward.py -k keys_descend",
    ),
    Mutant(
        "hopper: the forward waits for the first row only",
        "kernels/hopper/forward_producer.py",
        "wait_row(flags_ptr, row, epoch, timed_out_ptr, 4)\n                arrived = row\n        for column",
        "wait_row(flags_ptr, row * 0, epoch, timed_out_ptr, 4)\n                arrived = row\n        for column",
        "tests/test_hopper_forward.py -k arrive_after",
        gpu=True,
    ),
    Mutant(
        "triton: row offsets in 32 bits",
        "kernels/triton/primitives.py",
        "rows = (first + tl.arange(0, ROWS)).to(tl.int64)",
        "rows = first + tl.arange(0, ROWS)",
        "tests/test_triton.py",
    ),
    Mutant(
        "long sums: pieces of keys overlap",
        "kernels/long_sums.py",
        "keys = slice(low, min(low + KEYS, block.seq_k))",
        "keys = slice(low, min(low + KEYS + 1, block.seq_k))",
        "tests/test_long_sums.py",
    ),
    Mutant(
        "long sums: a piece's first is never said",
        "kernels/long_sums.py",
        "first = False",
        "first = True",
        "tests/test_long_sums.py",
    ),
    # --- dataflows
    Mutant(
        "ring: the state of a shard is dropped",
        "ringattn/dataflow/ring.py",
        "state = kernel.forward(call.q, Keys(*visit.shard, block), call.score, state)",
        "state = kernel.forward(call.q, Keys(*visit.shard, block), call.score, None)",
        _FLOWS,
    ),
    Mutant(
        "ring: the block of the neighbour",
        "ringattn/dataflow/ring.py",
        "block = call.block(plan.rank, visit.owner)",
        "block = call.block(visit.owner, plan.rank)",
        _FLOWS,
    ),
    Mutant(
        "ring: gradients stay here",
        "ringattn/dataflow/ring.py",
        "dk, dv = circulation.home or (torch.zeros_like",
        "dk, dv = dk_dv if plan.world_size > 1 and False else None or (torch.zeros_like",
        _FLOWS,
    ),
    Mutant(
        "ring: partial sums in the inputs' dtype",
        "ringattn/dataflow/ring.py",
        "contribution = Contribution((call.k.shape, call.v.shape), dtype, add_gradients)",
        "contribution = Contribution((call.k.shape, call.v.shape), call.k.dtype, add_gradients)",
        _FLOWS,
    ),
    Mutant(
        "reduce: the sink joins on every rank",
        "ringattn/dataflow/reduce.py",
        "call.score.without_sink()",
        "call.score",
        _FLOWS + " tests/test_attention.py",
    ),
    Mutant(
        "reduce: dq of the first visit only",
        "ringattn/dataflow/reduce.py",
        "dkdv = new if dkdv is None else add_gradients(dkdv, new)",
        "dkdv = new",
        _FLOWS,
    ),
    Mutant(
        "circulation: wait for messages is missing",
        "ringattn/dataflow/circulation.py",
        '            with named("hop", t, "wait"):\n                moving.wait()\n',
        "",
        _FLOWS + " tests/test_circulation.py",
    ),
    Mutant(
        "circulation: a contribution is forgotten",
        "ringattn/dataflow/circulation.py",
        "leaving, self._new = self._sum(so_far, self._new), None",
        "leaving, self._new = so_far or self._new, None",
        _FLOWS,
    ),
    Mutant(
        "schedule: contributions go home one step late",
        "ringattn/layouts/schedule.py",
        "if t == visits[rank] and t > 1:",
        "if t == visits[rank] + 1 and t > 1:",
        _PLAN,
    ),
    Mutant(
        "schedule: a double ring in single steps",
        "ringattn/layouts/schedule.py",
        "return (group + shift[0]) % groups * self.local_size +",
        "return (group + shift[0] + 1) % groups * self.local_size +",
        _PLAN,
    ),
    Mutant(
        "gather: the first wave's heads for all",
        "ringattn/dataflow/gather.py",
        "part.queries(result.out, 2)[:], part.queries(result.lse, 1)[:] = done",
        "result.out[:, :, : done.out.shape[2]], part.queries(result.lse, 1)[:] = done",
        "tests/test_extend.py tests/test_heads.py",
    ),
    Mutant(
        "gather: scores of the first heads for all",
        "ringattn/dataflow/gather.py",
        'score = call.score if part.whole else call.score.heads(part.q_heads)\n            with named("wave", part.wave, "forward")',
        'score = call.score if part.whole else call.score.heads(slice(0, part.q_heads.stop - part.q_heads.start))\n            with named("wave", part.wave, "forward")',
        "tests/test_extend.py tests/test_heads.py",
    ),
    Mutant(
        "gather: gradients of another run",
        "ringattn/dataflow/routes.py",
        "                total[rows] += piece",
        "                total[: len(piece)] += piece",
        _FLOWS,
    ),
    Mutant(
        "gather: sums in another order than that of ranks",
        "ringattn/dataflow/routes.py",
        "for rows, piece in pieces:",
        "for rows, piece in pieces[::-1]:",
        "tests/test_heads.py",
    ),
    Mutant(
        "gather: predicted memory twice too large",
        "ringattn/dataflow/messages.py",
        "key, gradient = s.kv_elements * s.itemsize, s.kv_elements * s.state_itemsize\n    results",
        "key, gradient = s.kv_elements * s.itemsize, 2 * s.kv_elements * s.state_itemsize\n    results",
        "tests/test_memory.py",
    ),
    # --- gather by node
    Mutant(
        "relay: the first rank of a node carries everything",
        "ringattn/layouts/relay.py",
        "return ranks[index % len(ranks)]",
        "return ranks[0]",
        "tests/test_by_node.py",
    ),
    Mutant(
        "relay: a run is taken from where its carrier's begins",
        "ringattn/layouts/relay.py",
        "offset=own + part.first + run.offset - part.offset)",
        "offset=own + part.first)",
        "tests/test_by_node.py",
    ),
    Mutant(
        "by node: gradients of other nodes are lost",
        "ringattn/dataflow/messages.py",
        "            self.network[0].add(self.between.pieces, total)\n",
        "",
        "tests/test_by_node.py",
    ),
    Mutant(
        "carry: pulls do not wait for messages",
        "ringattn/peer/carry.py",
        "        pulling.wait_event(arrived)\n",
        "",
        "tests/test_pulls_by_node.py",
    ),
    Mutant(
        "carrying: sums leave before they are made",
        "ringattn/dataflow/hierarchical_engines.py",
        "        stream.wait_stream(main)\n",
        "",
        "tests/test_pulls_by_node.py",
    ),
    Mutant(
        "verify: a token may cross the network twice",
        "ringattn/verify.py",
        "torch.cat(crosses).sort().values",
        "torch.cat(crosses).unique()",
        "tests/test_by_node.py",
    ),
    Mutant(
        "planning: nodes are not compared",
        "ringattn/request.py",
        '            nodes=f"{len(self.nodes)}, hash {hash_of(repr(self.nodes)):x}",\n',
        "",
        "tests/test_by_node.py",
    ),
    # --- copies between GPUs, on simulated GPUs
    Mutant(
        "pull: no wait for the other ranks",
        "ringattn/peer/pull.py",
        "            link.wait_for(pulling, READY, self.epoch)\n",
        "            pass\n",
        _COPIES,
    ),
    Mutant(
        "pull: flags before the copies",
        "ringattn/peer/pull.py",
        "            copies[self.slot].queue(link.pulling)\n            flags.write(link.pulling, self.epoch)\n",
        "            flags.write(link.pulling, self.epoch)\n            copies[self.slot].queue(link.pulling)\n",
        _COPIES,
    ),
    Mutant(
        "pull: one slot for all calls",
        "ringattn/peer/pull.py",
        "self.slot = link.next_slot()",
        "self.slot = 0",
        _COPIES,
    ),
    Mutant(
        "pull: a copy of the wrong row",
        "ringattn/peer/pull.py",
        "shared_row = batch * self.heads + heads.start + head",
        "shared_row = batch * self.heads + head",
        _COPIES,
    ),
    Mutant(
        "pull: the buffer is written too early",
        "ringattn/peer/pull.py",
        "        pulling.wait_event(link.writable)\n",
        "",
        _COPIES,
    ),
    Mutant(
        "push: no wait for free memory",
        "ringattn/peer/push.py",
        "        link.wait_for(pushing, FREE, self.epoch - 1)\n",
        "",
        _COPIES,
    ),
    Mutant(
        "push: LANDED before the copies",
        "ringattn/peer/push.py",
        "                counters.wait(pushing, indices)\n",
        "                pass\n",
        _COPIES,
    ),
    Mutant(
        "push: waits for some of the groups that are pushed together",
        "ringattn/peer/push.py",
        "                    counters.append(chunk * len(groups) + group)\n",
        "                    counters = counters or [chunk * len(groups) + group]\n",
        _COPIES,
    ),
    Mutant(
        "pull: flags of rows that are not in the chunk yet",
        "ringattn/peer/pull.py",
        "self._copies(wave, chunk, slot, self.pulled)",
        "self._copies(wave, chunk[:1], slot, self.pulled)",
        _COPIES,
    ),
    Mutant(
        "pull: a call for each short row",
        "ringattn/peer/pull.py",
        "max(1, -(-driver.WORTH_A_CALL // max(1, row_bytes)))",
        "1",
        "tests/test_pulls.py -k few_calls",
    ),
    Mutant(
        "push: memory is free before the sum",
        "ringattn/peer/push.py",
        "        sum_runs(targets.table, self.partials.pop(wave), targets.landed, dk, dv)\n        link.signal(main, FREE, self.epoch)\n",
        "        link.signal(main, FREE, self.epoch)\n        sum_runs(targets.table, self.partials.pop(wave), targets.landed, dk, dv)\n",
        _COPIES,
    ),
    Mutant(
        "memory: a larger buffer while another stream reads",
        "ringattn/peer/link.py",
        "            self._receive_stream.wait_event(self.released)\n",
        "",
        "tests/test_pulls.py tests/test_memory.py",
    ),
    Mutant(
        "memory: old addresses of replaced memory",
        "ringattn/peer/link.py",
        "            region = self._regions[which] = Region(*self.share(max(1, -(-size // (1 << 21))) << 21))\n            self.prepared.clear()\n",
        "            region = self._regions[which] = Region(*self.share(max(1, -(-size // (1 << 21))) << 21))\n",
        _COPIES,
    ),
    Mutant(
        "pull: memory between runs is not zero",
        "ringattn/peer/pull.py",
        "self.device, gaps(self.runs))",
        "self.device)",
        _COPIES,
    ),
    Mutant(
        "gather: rows between messages are not zero",
        "ringattn/dataflow/routes.py",
        "arrived.new_zeros((self.rows",
        "arrived.new_empty((self.rows",
        "tests/test_alignment.py",
    ),
    Mutant(
        "alignment: the first run of queries counts, not the longest",
        "ringattn/layouts/alignment.py",
        "key=lambda i: min(queries[i].stop, high) - max(starts[i], low)",
        "key=lambda i: -i",
        "tests/test_alignment.py",
    ),
    Mutant(
        "pack_rows: own runs one row late",
        "ringattn/peer/pack_rows.py",
        "place = tl.where((t >= offset) & (t < offset + length), first + t - offset, place)",
        "place = tl.where((t >= offset) & (t < offset + length), first + t - offset + 1, place)",
        "tests/test_pack_rows.py",
    ),
    Mutant(
        "sum_runs: the first token of a piece is left out",
        "ringattn/peer/sum_runs.py",
        "inside = ((t >= begin) & (t < end))[:, None]",
        "inside = ((t > begin) & (t < end))[:, None]",
        "tests/test_sum_runs.py",
    ),
    # --- plans and agreement
    Mutant(
        "planning: deterministic is not compared",
        "ringattn/request.py",
        "            deterministic=self.deterministic,\n            local_size",
        "            local_size",
        _PLAN,
    ),
    Mutant(
        "planning: local_size is not compared",
        "ringattn/request.py",
        "            local_size=self.local_size,\n            nodes",
        "            nodes",
        _PLAN,
    ),
    Mutant(
        "planning: buffer_bytes is not compared",
        "ringattn/request.py",
        "            buffer_bytes=self.buffer_bytes,\n            timeout",
        "            timeout",
        _PLAN,
    ),
    Mutant(
        "planning: layout is not compared",
        "ringattn/request.py",
        '            layout=self.layout if isinstance(self.layout, str) else f"of plan {self.layout.digest:x}",\n',
        "",
        _PLAN,
    ),
    Mutant(
        "planning: the prefix is not compared",
        "ringattn/request.py",
        "        prefix=prefix,\n        cu_seqlens",
        "        cu_seqlens",
        _PLAN,
    ),
    Mutant(
        "agreement: the last rank is not looked at",
        "ringattn/agreement.py",
        "        for rank, row in enumerate(table):\n            ranks.setdefault",
        "        for rank, row in enumerate(table[:-1]):\n            ranks.setdefault",
        "tests/test_agreement.py",
    ),
    Mutant(
        "agreement: floats as integers",
        "ringattn/agreement.py",
        'return struct.unpack("<q", struct.pack("<d", value))[0]',
        "return int(value)",
        "tests/test_agreement.py",
    ),
    Mutant(
        "verify: a key met twice is no error",
        "ringattn/verify.py",
        "met[rank, keys_met] = True",
        "met[rank, keys_met] = False",
        "tests/test_plan.py",
    ),
    Mutant(
        "verify: a key twice in one block is no error",
        "ringattn/verify.py",
        "nth[last] - nth[first] == last - first",
        "nth[last] - nth[first] <= last - first",
        "tests/test_plan.py -k tells_keys_apart",
    ),
    Mutant(
        "cost: windowed rings take all pairs",
        "ringattn/predict/cost.py",
        "pairs = p.pairs[r][o] if ring else p.pairs[o][r]",
        "pairs = sum(p.pairs[r]) if ring else p.pairs[o][r]",
        "tests/test_cost.py",
    ),
    Mutant(
        "cost: all ranks of a ring wait for the slowest one",
        "ringattn/predict/cost.py",
        "low, high = sorted((began[r] + work, start[r] + links))",
        "low, high = sorted((max(began) + work, start[r] + links))",
        "tests/test_cost.py -k neighbours",
    ),
    Mutant(
        "circulation: a shard is kept while contributions come home",
        "ringattn/dataflow/circulation.py",
        "self._current = cast(S, arriving)",
        "self._current = self._current if arriving is None else cast(S, arriving)",
        "tests/test_memory_predicted.py",
    ),
    Mutant(
        "planner: memory has all gradients next to all activations",
        "ringattn/tools/planner/memory.py",
        "gradients = head + done * model.layer_parameters * share",
        "gradients = head + model.layers * model.layer_parameters * share",
        "tests/test_planner.py -k measured",
    ),
    Mutant(
        "planner: the MLP's gradients are not counted",
        "ringattn/tools/planner/memory.py",
        "mlp = before + norm + a.x + (6 if s.recompute else 3) * a.m",
        "mlp = before + norm + a.x + (4 if s.recompute else 3) * a.m",
        "tests/test_planner.py -k activations",
    ),
    Mutant(
        "planner: passes over memory of the backward are not counted",
        "ringattn/tools/planner/training_step.py",
        "backward = 107 * x +",
        "backward = 0 * x +",
        "tests/test_planner.py -k passes",
    ),
    Mutant(
        "gather by node: a rank forgets its shard only after it has a buffer for what arrives",
        "ringattn/dataflow/hierarchical.py",
        "inside = node.deliver(node.outgoing(shards.pop(turn - 1)))",
        "shard = shards.pop(turn - 1); inside = node.deliver(node.outgoing(shard))",
        "tests/test_memory.py -k predicted",
    ),
    Mutant(
        "gather by node: many runs arrive and stay in their message",
        "ringattn/dataflow/hierarchical_engines.py",
        "rows[own:].copy_(delivery.buffer)",
        "pass",
        "tests/test_pulls_by_node.py -k many",
    ),
    Mutant(
        "shared memory: a rank that is lost is waited for",
        "ringattn/peer/symmetric.py",
        "if cause := self._lost():",
        'if cause := "":',
        "tests/test_faults.py -k shared",
    ),
    Mutant(
        "planner: a message does not wait for the one before it",
        "ringattn/tools/planner/simulate.py",
        "begin = np.maximum(_from(np.maximum(self.sending, ready), shift), self.receiving)",
        "begin = _from(ready, shift)",
        "tests/test_planner.py -k simulation",
    ),
    Mutant(
        "planner: other ranks do not wait for a slow one",
        "ringattn/tools/planner/simulate.py",
        "(setting.slow, self.speed)",
        "({}, self.speed)",
        "tests/test_planner.py -k slow",
    ),
    Mutant(
        "cost: copy engines inside of nodes need a buffer for all heads",
        "ringattn/predict/cost.py",
        "one_head = p.pulls or bool(p.nodes and p.pulls_inside)",
        "one_head = p.pulls",
        "tests/test_by_node.py -k million",
    ),
    Mutant(
        "planner: shards of a ring run ahead of its attention",
        "ringattn/tools/planner/simulate.py",
        "(np.maximum(x, self.kernels) for x in (self.sending, self.receiving))",
        "(self.sending, self.receiving)",
        "tests/test_planner.py -k step_by_step",
    ),
    Mutant(
        "planner: the longest row needs no buffer",
        "ringattn/tools/planner/ways.py",
        "if least * tokens > switches.buffer_bytes * 128:",
        "if False:",
        "tests/test_planner.py -k longest_row",
    ),
    Mutant(
        "cost: the two stages of a gather by node are one",
        "ringattn/predict/cost.py",
        "return between, inside * share / rate + fixed * (len(node) > 1)",
        "return between, 0.0",
        "tests/test_planner.py -k near_the_cost_model",
    ),
    Mutant(
        "errors: a stopped rank is taken for one that runs",
        "ringattn/peer/watchdog.py",
        'return "is stopped" if letter in "Tt" else "runs"',
        'return "runs"',
        "tests/test_watchdog.py",
    ),
    Mutant(
        "errors: the time limit is not that of the plan",
        "ringattn/request.py",
        'transport.begin("plan()", timeout=limit, compares=True)',
        'transport.begin("plan()", compares=True)',
        "tests/test_faults.py -k time_limit",
    ),
    Mutant(
        "errors: the first plan has the time limit of the group",
        "ringattn/request.py",
        "transport = transports.of(group, limit)",
        "transport = transports.of(group)",
        "tests/test_faults.py -k time_limit",
    ),
    Mutant(
        "errors: Ctrl-C waits for the message",
        "ringattn/transport/pending.py",
        "if threading.current_thread() is not threading.main_thread():",
        "if True:",
        "tests/test_faults.py -k interrupted",
    ),
    Mutant(
        "errors: a rank of this host is blamed for one of another",
        "ringattn/peer/watchdog.py",
        "if unseen and not slower:",
        "if not visible:",
        "tests/test_watchdog.py tests/test_health.py",
    ),
    Mutant(
        "errors: what another host waits for is taken for the cause",
        "ringattn/transport/other_hosts.py",
        "or (late and notice.peer is None)",
        "or (late and notice.peer == -1)",
        "tests/test_other_hosts.py",
    ),
    Mutant(
        "errors: a guess replaces the cause that another rank knows",
        "ringattn/transport/other_hosts.py",
        "                if peer is not None:\n                    self._store.set",
        "                if True:\n                    self._store.set",
        "tests/test_other_hosts.py",
    ),
    Mutant(
        "errors: a late rank of this host is blamed, which waits for another host",
        "ringattn/transport/health.py",
        "        return None, cause\n",
        "        return peer, cause\n",
        "tests/test_health.py",
    ),
    Mutant(
        "lockstep: calls of other ranks are not read",
        "ringattn/transport/health.py",
        "other.digest != call.digest and not",
        "other.digest != other.digest and not",
        "tests/test_lockstep.py",
    ),
    Mutant(
        "lockstep: backwards have no number",
        "ringattn/operators.py",
        "if type(output[0]) is Tensor else 0",
        "* 0",
        "tests/test_lockstep.py",
    ),
    Mutant(
        "lockstep: grad mode is not compared",
        "ringattn/operators.py",
        "            grad_mode=grad_mode,",
        "            grad_mode=True,",
        "tests/test_lockstep.py",
    ),
    Mutant(
        "largest score: of this rank only",
        "ringattn/operators.py",
        "torch.stack(of_ranks).amax(0)",
        "largest",
        "tests/test_largest.py",
    ),
    Mutant(
        "largest score: of the first interval per query only",
        "kernels/backends.py",
        "            for walk in keys.walks():",
        "            for walk in keys.walks()[:1]:",
        "tests/test_largest.py",
    ),
    Mutant(
        "largest score: rows after the end of a tile count",
        "kernels/triton/largest.py",
        'top = tl.where(alive, top, float("-inf"))',
        "top = top",
        "tests/test_largest.py",
    ),
    Mutant(
        "lockstep: training mode is that of the outermost module",
        "ringattn/transport/lockstep.py",
        'return "on" if frame.f_locals["self"].training else "off"',
        'return "on"',
        "tests/test_lockstep.py",
    ),
    Mutant(
        "lockstep: a refused call is one like others",
        "ringattn/transport/lockstep.py",
        'return self.begin(f"{call} refused", compares=False)._replace(refused=True)',
        "return CallMark(self.number, self.digest, False)",
        "tests/test_lockstep.py",
    ),
    Mutant(
        "lockstep: numbers go on after an error of all ranks",
        "ringattn/transport/lockstep.py",
        "self.number, self.digest = (self.number // _ROUND + 1) * _ROUND, 0",
        "pass",
        "tests/test_lockstep.py",
    ),
    Mutant(
        "same bits: buffers are not on the grid of periods",
        "ringattn/dataflow/tiles.py",
        "padding = (tiles.start - row) % unit",
        "padding = 0",
        "tests/test_same_bits.py -k triton_flushes",
    ),
    Mutant(
        "same bits: only queries that see keys under the first member are gathered",
        "ringattn/dataflow/tiles.py",
        "    for member in mask.members:",
        "    for member in mask.members[:1]:",
        "tests/test_same_bits.py -k verify",
    ),
    Mutant(
        "same bits: a state is carried from interval to interval",
        "ringattn/dataflow/same_bits.py",
        "state = state.add_(call.backend.forward(q, one, score.without_sink()))",
        "state = call.backend.forward(q, one, score.without_sink(), state)",
        "tests/test_same_bits.py -k triton_kernels_under_a_union",
    ),
    Mutant(
        "same bits: tiles are not whole",
        "ringattn/dataflow/tiles.py",
        "start, stop = run.start // GRID * GRID, -(-run.stop // GRID) * GRID",
        "start, stop = run.start, run.stop",
        "tests/test_same_bits.py",
    ),
    Mutant(
        "same bits: full tiles are walked first",
        "kernels/contract.py",
        "            full_end = torch.zeros_like(full_end)  # no full tiles: they would be walked before the cut ones\n",
        "            full_end = full_end.clone()\n",
        "tests/test_same_bits.py -k triton_flushes",
    ),
    # --- what training sees
    Mutant(
        "checkpoint: any content has the right sum",
        "scripts/checkpoint.py",
        'return hashlib.file_digest(file, "sha256").hexdigest()',
        "return file.name[:0]",
        "tests/test_survival.py tests/test_train.py",
    ),
    Mutant(
        "batch: labels are not shifted",
        "ringattn/training/batch.py",
        "targets[:, :-1] = labels[:, 1:]",
        "targets[:, :] = labels",
        _BATCH,
    ),
    Mutant(
        "batch: targets cross documents",
        "ringattn/training/batch.py",
        "(begin[:, 1:] == begin[:, :-1]) & real[:, 1:]",
        "real[:, 1:]",
        _BATCH,
    ),
    Mutant(
        "batch: positions that restart inside a document of the plan pass",
        "ringattn/training/batch.py",
        "    wrong = inside[:, at - 1] & seen\n",
        "    wrong = inside[:, at - 1] & ~seen\n",
        "tests/test_batch.py -k refuses_positions",
    ),
    Mutant(
        "batch: positions go on in the next document",
        "ringattn/training/batch.py",
        "restart = torch.where(real & (begin > first), begin, 0)",
        "restart = torch.zeros_like(begin)",
        _BATCH,
    ),
    Mutant(
        "loss: a mean over ranks",
        "ringattn/training/loss.py",
        "return summed * ranks / divisor",
        "return summed / divisor",
        "tests/test_loss.py",
    ),
    Mutant(
        "loss: local targets only",
        "ringattn/training/loss.py",
        'return transport.all_reduce(x, "sum")',
        "return x",
        "tests/test_loss.py",
    ),
    Mutant(
        "functional: the scale of another head dim",
        "ringattn/functional.py",
        "scale = scale_of(q, softmax_scale)",
        "scale = scale_of(v, softmax_scale)",
        _FLOWS,
    ),
    Mutant(
        "functional: kv_heads need not divide",
        "ringattn/functional.py",
        "if kv_heads == 0 or q_heads % kv_heads:",
        "if kv_heads == 0:",
        "tests/test_errors.py",
    ),
    Mutant(
        "loads: tiles of one run only",
        "ringattn/layouts/loads.py",
        "for run in shard for i in range(0, len(run), TILE)]",
        "for run in shard[:1] for i in range(0, len(run), TILE)]",
        "tests/test_balance.py",
    ),
    Mutant(
        "balance: a long document is cut inside of a tile where whole ones do not match exactly",
        "ringattn/layouts/balance.py",
        "part.first * below - near <= need <= part.last * below + near",
        "part.first * below <= need <= part.last * below",
        "tests/test_balance.py -k whole_tiles",
    ),
    Mutant(
        "balance: the busiest rank keeps its tiles",
        "ringattn/layouts/redivision.py",
        "        every.even_out()\n",
        "",
        "tests/test_balance.py -k few_documents",
    ),
    Mutant(
        "balance: documents that are not causal are peeled",
        "ringattn/layouts/balance.py",
        "if work.full and len(work.cuts) > 2:",
        "if False:",
        "tests/test_balance.py -k rows_of_full_documents",
    ),
    Mutant(
        "balance: long documents that are not causal are cut as readily as short ones",
        "ringattn/layouts/halving.py",
        "cost = reach + RUN",
        "cost = RUN",
        "tests/test_balance.py -k rows_of_full_documents",
    ),
    Mutant(
        "memory: runs that are one message arrive with the space between them",
        "ringattn/dataflow/messages.py",
        "return sum(run.length for run in runs) if together else buffer_rows(runs)",
        "return buffer_rows(runs)",
        "tests/test_memory_predicted.py -k collected",
    ),
    Mutant(
        "memory: the keys of a group stay while those of the next are sorted",
        "ringattn/dataflow/messages.py",
        "yield part_of(call, block, groups, i, rows.pop())",
        "yield part_of(call, block, groups, i, rows[0])",
        "tests/test_memory_predicted.py -k collected",
    ),
    Mutant(
        "balance: a document is cut without its tail",
        "ringattn/layouts/balance.py",
        "return range(max(start, stop - tokens), stop) if self.tail else",
        "return range(start, min(stop, start + tokens)) if self.tail else",
        "tests/test_balance.py",
    ),
    # --- generation
    Mutant(
        "generation: a shared page is written",
        "ringattn/generation/slots.py",
        "copied = index if others > 1 else -1",
        "copied = index if others > 2 else -1",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: pages are freed that a window still needs",
        "ringattn/generation/slots.py",
        "return max(0, length - kind.window - SLACK) if kind.window >= 0 else 0",
        "return max(0, length - kind.window + 16) if kind.window >= 0 else 0",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: turns go to the rank with the most tokens",
        "ringattn/generation/slots.py",
        "key=lambda rank: (counts[rank], (rank - number)",
        "key=lambda rank: (-counts[rank], (rank - number)",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: room is not counted before pages are taken",
        "ringattn/generation/slots.py",
        "                needed[key] += new + (copied >= 0)",
        "                needed[key] += new",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: kept tokens of a tree stay where they were",
        "ringattn/generation/storage.py",
        "x.index_copy_(2, target, x.index_select(2, source))",
        "x.index_copy_(2, source, x.index_select(2, source))",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: moved tokens keep no position",
        "ringattn/generation/storage.py",
        "index_copy_(0, target, positions)",
        "index_copy_(0, target, positions * 0)",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: a fork's copy lacks positions",
        "ringattn/generation/storage.py",
        "for x, dim in (*((x, 2) for x in self._of_kind(kind)), (self.positions[begin:], 0)):",
        "for x, dim in ((x, 2) for x in self._of_kind(kind)):",
        "tests/test_cache.py",
    ),
    Mutant(
        "generation: new tokens of a plan are counted from 0",
        "ringattn/choosing.py",
        "itertools.repeat(self.mask.offset)",
        "itertools.repeat(0)",
        "tests/test_cache.py",
    ),
    Mutant(
        "paged: the states of ranks are added without their weights",
        "kernels/paged/eager.py",
        "total = total + l[rank] * weight",
        "total = total + l[rank]",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: a piece is added without its weight",
        "kernels/paged/pieces.py",
        "l = l * kept + tl.sum(li * weight, 0)",
        "l = l * kept + tl.sum(li, 0)",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: a tree's tokens see what comes after their own",
        "kernels/paged/attend.py",
        "seen &= (bit < 0)[None, :] | (branch > 0)",
        "seen &= (bit < 64)[None, :] | (branch > 0)",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: a cut tile is taken for a full one",
        "kernels/paged/attend.py",
        "full_hi = tl.minimum(tl.maximum(full_past // TILE - begin, full_lo), hi)",
        "full_hi = tl.minimum(tl.maximum(full_past // TILE + 1 - begin, full_lo), hi)",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: a turn begins where the next rank's tokens are most",
        "kernels/paged/advance.py",
        "fewest = tl.min(order, 1)",
        "fewest = tl.max(tl.where((r < WORLD)[None, :], order, -1), 1)",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: values of e4m3 are weighed by the scales of keys",
        "kernels/paged/attend.py",
        "p *= _scales(v_scale, h,",
        "p *= _scales(k_scale, h,",
        "tests/test_paged.py",
    ),
    Mutant(
        "paged: rows of a group attend to the shared prefix twice",
        "ringattn/generation/step.py",
        "start[-1, list(group.rows)] = group.slots",
        "start[-1, list(group.rows)] = 0",
        "tests/test_cascade.py",
    ),
    Mutant(
        "paged: a row of forks gets another one's prefix",
        "kernels/paged/cascade.py",
        "else order.index(row) for row in range(batch)]",
        "else row for row in range(batch)]",
        "tests/test_cascade.py",
    ),
    Mutant(
        "decode: a rank gets another one's heads",
        "kernels/paged/contract.py",
        "first = rank * size + min(rank, more)",
        "first = rank * size",
        "tests/test_decode.py",
    ),
    Mutant(
        "meet: a merge uses the slot of the one before",
        "kernels/paged/meet.py",
        "region = ((number & 1) * WORLD + sender)",
        "region = ((number & 0) * WORLD + sender)",
        "tests/test_meet.py",
    ),
    Mutant(
        "meet: a rank sends another one's heads",
        "kernels/paged/meet.py",
        "return rank * size + tl.minimum(rank, more), size",
        "return rank * size, size",
        "tests/test_meet.py",
    ),
    Mutant(
        "meet: the flag is for the stores of one thread",
        "kernels/paged/meet.py",
        "tl.debug_barrier()  # the release is for what all threads have stored",
        "pass",
        "tests/test_meet.py",
    ),
    Mutant(
        "meet: a thread reads what it has not waited for",
        "kernels/paged/meet.py",
        "tl.debug_barrier()  # every thread has waited for one rank",
        "pass",
        "tests/test_meet.py",
    ),
    Mutant(
        "meet: a merge on another stream does not wait",
        "ringattn/peer/mailbox.py",
        "if stream != last:",
        "if stream is None:",
        "tests/test_meet.py",
    ),
    Mutant(
        "meet: only the first rank is waited for",
        "kernels/paged/meet.py",
        "sender = tl.minimum(tl.arange(0, WORLD_P2), WORLD - 1)",
        "sender = tl.minimum(tl.arange(0, WORLD_P2), 0)",
        "tests/test_meet_gpu.py",
        gpu=True,
    ),
    Mutant(
        "cache: replays after a sync() are not counted",
        "ringattn/generation/step.py",
        "if self.is_ahead or not self._counted:  # replays",
        "if self.is_ahead:  # replays",
        "tests/test_cache.py",
    ),
    # --- what mixes neighbours, and the check
    Mutant(
        "neighbours: across documents",
        "ringattn/tokens/halo.py",
        "visible = (inside & same & both).transpose(0, 1)",
        "visible = (inside & both).transpose(0, 1)",
        "tests/test_exchange.py -k shift",
    ),
    Mutant(
        "exchange: gradients of rows that were sent do not come back",
        "ringattn/tokens/exchange.py",
        "        own.index_add_(0, index, a)",
        "        pass",
        "tests/test_exchange.py -k shift",
    ),
    Mutant(
        "by heads: groups begin one later",
        "ringattn/tokens/heads.py",
        "return range(groups * rank // world_size, groups * (rank + 1) // world_size)",
        "return range((groups * rank + 1) // world_size, groups * (rank + 1) // world_size)",
        "tests/test_exchange.py -k heads",
    ),
    Mutant(
        "check: weights stay as they are",
        "ringattn/tools/check/comparison.py",
        "scale = 0.1 * p.square().mean().sqrt() + 0.02",
        "scale = 0.0",
        "tests/test_comparison.py -k shift",
    ),
    Mutant(
        "loss: row sums carry gradients of one rank's share",
        "ringattn/training/loss.py",
        "return part + (_summed(",
        "return part / transports.of(group).world_size + (_summed(",
        "tests/test_docs.py -k preferences",
    ),
    Mutant(
        "hf: a hybrid's state runs through documents",
        "ringattn/adapters/hf/hybrids.py",
        "if runs == [[(0, plan.seq_len, True)]]:",
        "if True:",
        "tests/test_hf_models.py -k qwen3_next",
    ),
    Mutant(
        "virtual: messages are views",
        "ringattn/virtual.py",
        "self.world.box(self.rank, peer).put(self.world.sent(x.clone()))",
        "self.world.box(self.rank, peer).put(self.world.sent(x))",
        "tests/test_virtual.py",
    ),
    # --- host memory
    Mutant(
        "staging: kernels do not wait for their inputs",
        "ringattn/host/staging.py",
        "self._engines.compute.wait_event(fetched)",
        "pass",
        "tests/test_host_memory.py",
    ),
    Mutant(
        "staging: query heads of the wrong key head",
        "ringattn/host/staging.py",
        "heads.start * self.share",
        "heads.start",
        "tests/test_host_memory.py -k bits",
    ),
    Mutant(
        "staging: both groups in one place",
        "ringattn/host/staging.py",
        "self._places[index % 2]",
        "self._places[0]",
        "tests/test_host_memory.py -k bits",
    ),
    Mutant(
        "pitched: the target's distance of rows for the source",
        "ringattn/host/strided.py",
        "source_pitch=unit * height.source",
        "source_pitch=unit * height.target",
        "tests/test_host_memory.py -k rows",
    ),
    Mutant(
        "host memory: slopes are divided in the dimension of the batch",
        "ringattn/host/attention.py",
        "x.ndim - 1)",
        "0)",
        "tests/test_host_memory.py -k bits",
    ),
)


class Verdict(NamedTuple):
    mutant: Mutant
    outcome: str  # "caught", "survived", or why it could not be tried
    seconds: float
    by: str  # the first test that failed


def _copy(into: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    tar = ["tar", "--null", "--files-from=-", "--ignore-failed-read", "-cf", "-"]
    packed = subprocess.run(tar, cwd=ROOT, input=names, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-xf", "-"], cwd=into, input=packed, check=True)


def try_tests(tests: str, tree: Path, seconds: float = SECONDS) -> tuple[str, str]:
    """Run tests in a tree. Return ("passed", "failed", "hung" or an error, the first test that failed)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *tests.split(),
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HYPOTHESIS_SEED": "0"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for each other, too
            process.communicate()
            return "hung", f"(not ended after {seconds:g} s)"
    failed = next((line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")), "")
    if process.returncode == 0:
        return "passed", ""
    if process.returncode == 1 or process.returncode < 0:  # a crash is noticed, too
        return "failed", failed or f"(signal {-process.returncode})"
    return f"pytest ended with {process.returncode}: {output.strip().splitlines()[-1] if output.strip() else ''}", ""


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Plant a mutant in a tree, run its tests, and put the file back."""
    began, file = time.monotonic(), tree / mutant.file
    whole = file.read_text()
    file.write_text(mutant.planted())
    try:
        outcome, by = try_tests(mutant.tests, tree)
    finally:
        file.write_text(whole)
    outcome = {"passed": "survived", "failed": "caught", "hung": "caught"}.get(outcome, outcome)
    return Verdict(mutant, outcome, time.monotonic() - began, by)


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Yield the verdicts as they come, from ``jobs`` trees at the same time."""
    left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        left.put(mutant)
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _copy(Path(folder))
            while True:
                try:
                    mutant = left.get_nowait()
                except queue.Empty:
                    return
                verdicts.put(judge(mutant, Path(folder)))

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in mutants:
        yield verdicts.get()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="mutants whose name contains one of these")
    parser.add_argument("--gpu", action="store_true", help="those that need a Hopper GPU, and no others")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if m.gpu == args.gpu and (not args.only or any(word in m.name for word in args.only))]
    if not chosen:
        parser.error(f"no mutant has a name with {' or '.join(map(repr, args.only or ['--gpu']))}")
    verdicts = []
    for verdict in judge_all(chosen, args.jobs):
        verdicts.append(verdict)
        print(f"{verdict.outcome:9} {verdict.seconds:5.0f} s  {verdict.mutant.name}  {verdict.by}", flush=True)
    missed = [v for v in verdicts if v.outcome != "caught"]
    for verdict in missed:
        print(f"NOT CAUGHT: {verdict.mutant.name} ({verdict.outcome}) by {verdict.mutant.tests}")
    print(
        json.dumps(
            dict(mutants=len(verdicts), caught=len(verdicts) - len(missed), missed=[v.mutant.name for v in missed])
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
