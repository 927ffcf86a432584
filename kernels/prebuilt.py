"""Kernels that were compiled before they were installed: a wheel carries those of a first call (scripts/prebuild.py).

A kernel is two files, Triton's metadata and the cubin, in a folder for one Triton: its version and its Python sources.
Their name is the architecture and a hash of what Triton's own cache asks for: the source of the kernel and of all that
it calls, its types and constants, the options. Only the compiler itself, libtriton, is not in it, which is another file
for each version of Python. Anything that differs, and any variable that changes what Triton compiles, is a miss: Triton
compiles, as it does without these files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import cache, driver

from ..errors import warn

SWITCH = "RINGATTN_CUBINS"  # the variable: a folder in the place of FOLDER, or 0 for none
FOLDER = Path(__file__).with_name("cubins")
_COMPILER = ("backends/nvidia", "compiler", "experimental", "language", "runtime")  # folders of Triton
# Variables that change neither the code nor what is done with it, and those of others, which may.
_HARMLESS = {
    "TRITON_CACHE_AUTOTUNING", "TRITON_CACHE_DIR", "TRITON_DISABLE_LINE_INFO", "TRITON_HOME", "TRITON_INTERPRET",
    "TRITON_LIBCUDA_PATH", "TRITON_PRINT_AUTOTUNING",
}  # fmt: skip
_CHANGES = ("ALLOW_LHS_", "DISABLE_LLVM_", "DISABLE_PTXAS_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "TRITON_", "USE_IR_")
ADVICE = f"install ringattn again, or set {SWITCH}=0"  # about damage
_DIGEST = "digest"  # in the metadata: of the cubin and of the rest of the metadata
_hashing = threading.Lock()


def folder() -> Path:
    """Return the folder of the kernels for the installed Triton, which need not exist."""
    return Path(os.environ.get(SWITCH) or FOLDER) / f"triton-{triton.__version__}-{_sources()}"


def problem() -> str | None:
    """Return why no prebuilt kernel is used; None if there are some."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if (wrong := misnamed()) is not None:
        return wrong
    if not (place := folder()).is_dir():
        others = sorted(x.name for x in place.parent.glob("triton-*"))
        return f"{place.parent} has none for {place.name}" + (f", but for {', '.join(others)}" if others else "")
    if changed := sorted(name for name in os.environ if name.startswith(_CHANGES) and name not in _HARMLESS):
        return f"{', '.join(changed)} may change what Triton compiles"
    if knobs.runtime.add_stages_inspection_hook is not None:
        return "Triton's add_stages_inspection_hook is set"
    return None


def misnamed() -> str | None:
    """Return what is wrong if the variable names something that is not a folder."""
    named = os.environ.get(SWITCH) or "0"
    if named == "0" or Path(named).is_dir():
        return None
    return f"{SWITCH} is {named}, which is not a folder; pass one that python -m scripts.prebuild made, or unset it"


def serve(kernel: Any) -> None:
    """Let a kernel that is compiled for the current GPU be looked for here first, if there are prebuilt kernels."""
    if problem() is None:
        _ = kernel.device_caches[driver.active.get_current_device()]  # made when it is looked up, with kernel.compile
        if kernel.compile is triton.compiler.compile:
            kernel.compile = _compile


def name_of(src: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Return the name of a kernel's files, without a suffix. ``src``, ``target``, ``options``: as Triton's ``compile``
    takes them."""
    from triton.compiler.compiler import make_backend

    parsed = make_backend(target).parse_options(dict(options, **src.parse_options()))
    found = hashlib.sha256(f"{src.hash()}-{parsed.hash()}".encode()).hexdigest()
    return f"{getattr(parsed, 'arch', target.arch)}-{found[:40]}"


def write(place: Path, name: str, compiled: CompiledKernel) -> None:
    """Write a compiled kernel into the folder ``place`` as the files ``name``."""
    cubin, metadata = compiled.asm["cubin"], json.loads(json.dumps(compiled.metadata._asdict(), default=vars))
    del metadata["extern_libs"]  # paths of this machine
    metadata["hash"], metadata[_DIGEST] = name, None
    metadata[_DIGEST] = _digest(metadata, cubin)
    for kind, content in (("cubin", cubin), ("json", json.dumps(metadata).encode())):
        part = place / f"{name}.{os.getpid()}"
        part.write_bytes(content)
        part.replace(place / f"{name}.{kind}")  # other processes see all of it or nothing


def _compile(src: Any, target: Any, options: Mapping[str, Any], **more: Any) -> CompiledKernel:
    """Return the prebuilt kernel, or what Triton compiles."""
    found = _read(src, target, options) if problem() is None else None  # variables may have been set meanwhile
    if found is not None:
        return found
    with _hashing:  # of several threads, the first one hashes Triton's library
        getattr(cache, "triton_key", lambda: None)()
    return triton.compiler.compile(src, target=target, options=options, **more)


def _read(src: Any, target: Any, options: Mapping[str, Any]) -> CompiledKernel | None:
    """Return a kernel from its files; None if there are none, or, with a warning, if they are damaged."""
    name, place = name_of(src, target, options), folder()
    files = {f"{src.name}.{kind}": str(place / f"{name}.{kind}") for kind in ("json", "cubin")}
    if not (place / f"{name}.json").exists():
        return None
    if why := damage(place, name):
        warn(f"a prebuilt kernel is compiled instead: {why}; {ADVICE}", RuntimeWarning)
        return None
    compiled = CompiledKernel(src, files, name)
    if knobs.compilation.listener is not None:
        metadata, times = compiled.metadata._asdict(), knobs.CompileTimes(0, [], 0)
        knobs.compilation.listener(src=src, metadata=metadata, metadata_group=files, times=times, cache_hit=True)
    return compiled


def damage(place: Path, name: str) -> str | None:
    """Return what is wrong with the files of a kernel; None if they are as they were written."""
    path = place / f"{name}.json"
    try:
        metadata = json.loads(path.read_text())
        same = metadata[_DIGEST] == _digest(metadata, path.with_suffix(".cubin").read_bytes())
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{path} cannot be read ({type(error).__name__}: {error})"
    return None if same else f"{path}, or the .cubin next to it, has changed since it was written"


def _digest(metadata: Mapping[str, Any], cubin: bytes) -> str:
    text = json.dumps({**metadata, _DIGEST: None}, sort_keys=True)
    return hashlib.sha256(text.encode() + cubin).hexdigest()


@functools.cache
def _sources() -> str:
    """Return a hash of the sources of Triton that make, describe and launch kernels."""
    root, found = Path(triton.__file__).parent, hashlib.sha256()
    for some in _COMPILER:
        for path in sorted(path for path in (root / some).rglob("*") if path.suffix in (".py", ".c")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]
