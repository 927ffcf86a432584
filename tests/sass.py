"""The code that the compiler makes of a Triton or Gluon kernel for sm_90, read without a GPU.

``compile_for_hopper`` compiles a launch without launching it. ``Compiled`` then reports what silently costs speed or
correctness: spills, wgmma that ptxas serialized, writes to a register that a wgmma in flight still reads
(ptxas before 13.3 may produce them, triton-lang/triton#11781), and reads of a uniform register that was never written.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import CompiledKernel

# Registers, spills and the order of instructions depend on the compiler; a race is an error of any compiler.
OUR_COMPILER = triton.__version__.startswith("3.6.")
OTHER = f"Triton {triton.__version__} compiles to other code than 3.6, which was checked and timed"

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared: int  # bytes of shared memory

    @functools.cached_property
    def _build(self) -> tuple[str, str]:
        """Return the log of ptxas and the SASS."""
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            ptx.write_text(self.ptx)
            log = subprocess.run(
                [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", cubin],
                check=True, capture_output=True, text=True,
            ).stderr  # fmt: skip
            sass = subprocess.run(
                [TOOLS / "cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True
            ).stdout
        return log, sass

    @property
    def log(self) -> str:
        return self._build[0]

    @property
    def sass(self) -> str:
        return self._build[1]

    @property
    def stack_bytes(self) -> int:
        """Return the bytes of stack frame, spill stores and spill loads together."""
        sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", self.log)
        assert sizes, self.log
        return sum(map(int, sizes))

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of ptxas about wgmma: C7510 to C7515 mean that it waits after each one (serialized)."""
        return re.findall(r".*(?:C75\d\d|[Ss]erializ).*", self.log)

    def loops_with(self, op: str) -> list[Loop]:
        """Return the innermost loops with ``op`` in them. Retries of waits are placed after the last EXIT and jump back
        into the code: what is between is no loop."""
        code = self._instructions
        place = {address: i for i, (address, _) in enumerate(code)}
        loops: list[Loop] = []
        for i, (_, text) in enumerate(code):
            target = _branch_target(text)
            if target in place and place[target] <= i:
                body = code[place[target] : i + 1]
                if any(op in text for _, text in body) and not any("EXIT" in text for _, text in body):
                    loops.append(Loop(body))
        spans = [(loop.body[0][0], loop.body[-1][0]) for loop in loops]
        inner = [all(o == s or not (s[0] <= o[0] and o[1] <= s[1]) for o in spans) for s in spans]
        return [loop for loop, keep in zip(loops, inner, strict=True) if keep]

    @property
    def _instructions(self) -> list[tuple[int, str]]:
        return [(int(a, 16), t.strip()) for a, t in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", self.sass)]

    def overwritten_operands(self) -> list[str]:
        """Return writes to an A operand of a wgmma before the wait that retires it, in the order of the code.

        One commit (``gsb0``) closes a group; a wait for n groups retires all but the n latest.
        """
        groups: list[set[int]] = []
        current: set[int] = set()
        bad = []
        for address, text in self._instructions:
            op, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
            args = [a.strip() for a in rest.split(",")]
            if op.startswith("HGMMA"):
                if len(args) > 1 and "gdesc" not in args[1]:
                    current |= _registers(args[1], 4)
                if "gsb0" in rest:
                    groups.append(current)
                    current = set()
            elif op.startswith("WARPGROUP.DEPBAR"):
                pending = int(args[-1], 16)
                groups = groups[len(groups) - pending :] if 0 < pending <= len(groups) else groups if pending else []
                current = current if pending else set()
            elif op in ("BRA", "EXIT") and not text.startswith("@"):
                groups, current = [], set()
            elif not op.startswith(("ST", "BAR", "SYNCS", "RED", "UTMA")):
                wide = 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
                if _registers(args[0], wide) & current.union(*groups):
                    bad.append(f"{address:x}: {text}")
        return bad

    def undefined_uniforms(self) -> list[str]:
        """Return reads of a uniform register on some path from the entry that has not written it.

        ptxas 12.8 can make such code: loops share a value that is written only before one of them, which may be
        skipped. A move is no read: its target becomes as undefined as its source, which may be an unused value."""
        code = self._instructions
        effects = [uniforms(text) for _, text in code]
        moves = [re.match(r"UMOV ", text) for _, text in code]
        after = self._successors
        written: list[frozenset[int] | None] = [None] * len(code)  # on every path to here
        written[0], work = frozenset(), [0]
        while work:
            i = work.pop()
            before = written[i]
            assert before is not None
            reads, writes = effects[i]
            now = before | writes if reads <= before or not moves[i] else before - writes
            for j in after[i]:
                earlier = written[j]
                both = now if earlier is None else earlier & now
                if both != earlier:
                    written[j] = both
                    work.append(j)
        assert all(written[i] is not None for i, (_, text) in enumerate(code) if "HGMMA" in text), "not all was reached"
        return [
            f"{code[i][0]:x}: {code[i][1]}"
            for i, (reads, _) in enumerate(effects)
            if (now := written[i]) is not None and not reads <= now and not moves[i]
        ]

    @property
    def _successors(self) -> list[list[int]]:
        """Return the indices of the instructions that may follow each.

        The table of an indirect branch (of warps to their partitions) is not in the SASS: its targets are the
        instructions that no other one leads to."""
        code = self._instructions
        place = {address: i for i, (address, _) in enumerate(code)}
        after: list[list[int]] = []
        for i, (_, text) in enumerate(code):
            ends = re.match(r"EXIT|BRX|BRA (?!!?U?P\d)", text)  # BRA P0, ... has a condition of its own
            target = place.get(_branch_target(text))
            after.append([j for j in (None if ends else i + 1, target) if j is not None and j < len(code)])
        starts, reached = [0], set()
        for start in range(len(code)):
            if start > 0 and start not in reached:
                starts.append(start)
            work = [start]
            while work:
                if (i := work.pop()) not in reached:
                    reached.add(i)
                    work += after[i]
        for i, (_, text) in enumerate(code):
            after[i] += starts[1:] if text.startswith("BRX") else []
        return after


@dataclass(frozen=True)
class Loop:
    body: list[tuple[int, str]]  # address and instruction

    @property
    def path(self) -> str:
        """Return the instructions of the shortest way around: forward branches are taken if they skip something."""
        place = {address: i for i, (address, _) in enumerate(self.body)}
        # Backwards: the fewest instructions from each index to the end, and the next index on that way.
        length = [0] * (len(self.body) + 1)
        after = [0] * len(self.body)
        for i in reversed(range(len(self.body))):
            _, text = self.body[i]
            target = place.get(_branch_target(text), -1)
            ways = [i + 1] if text.startswith("@") or not text.startswith("BRA") else []
            if target > i:
                ways.append(target)
            after[i] = min(ways or [i + 1], key=length.__getitem__)
            length[i] = 1 + length[after[i]]
        i, path = 0, []
        while i < len(self.body):
            path.append(self.body[i][1])
            i = after[i]
        return "\n".join(path)


def _branch_target(text: str) -> int:
    match = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
    return int(match[1], 16) if match else -1


def uniforms(text: str) -> tuple[set[int], set[int]]:
    """Return the uniform registers that an instruction reads and writes: pairs for 64 bits, four for the descriptors of
    both operands of a wgmma, of which the first is unused if that operand is in registers."""
    op, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    operands = [x.strip() for x in rest.split(",")]
    writes: set[int] = set()
    if op.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")) and not op.startswith(("UTMA", "USETMAXREG")):
        while operands and re.match(r"!?U?P[\dT]", operands[0]):
            operands.pop(0)
        if operands and operands[0].startswith("UR"):
            writes = _uniform_range(operands.pop(0), 2 if ".64" in op or "WIDE" in op else 1)
    reads: set[int] = set()
    for i, operand in enumerate(operands):
        if operand.startswith("gdesc"):
            both = _uniform_range(operand, 4)
            reads |= both if i == 1 else set(sorted(both)[2:])
        else:
            wide = op.startswith("UTMA") or "desc[" in operand or (op.startswith("U") and ".64" in op)
            reads |= _uniform_range(operand, 2 if wide else 1)
    return reads, writes


def _uniform_range(operand: str, count: int) -> set[int]:
    return {int(n) + i for n in re.findall(r"\bUR(\d+)\b", operand) for i in range(count)}


def _registers(operand: str, count: int) -> set[int]:
    match = re.match(r"R(\d+)", operand)
    return set(range(int(match[1]), int(match[1]) + count)) if match else set()


class _Driver:
    """The part of a driver that compiling needs: one device of this target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        return "cpu"


@contextlib.contextmanager
def _driver_of(target: GPUTarget):
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(target))
    try:
        yield
    finally:
        triton.runtime.driver._active = active


def hopper_driver():
    """Return a context in which kernels are compiled for sm_90."""
    return _driver_of(GPUTarget("cuda", 90, 32))


def compile_for(target: GPUTarget, kernel, grid, args, options) -> CompiledKernel:
    """Compile ``kernel[grid](*args, **options)``; the tensors among the arguments may be on any device. ``options`` may
    have the ``variants`` of a launch and what to ``rehearse``, which are not compiled, and the size of its
    ``cluster``, which is not compiled in."""
    options = {name: value for name, value in options.items() if name not in ("variants", "rehearse", "cluster")}
    with _driver_of(target):
        return kernel.warmup(*args, grid=grid, **options)


def compile_for_hopper(kernel, grid, args, options) -> Compiled:
    """Compile a launch for sm_90, see :func:`compile_for`."""
    compiled = compile_for(GPUTarget("cuda", 90, 32), kernel, grid, args, options)
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared)
