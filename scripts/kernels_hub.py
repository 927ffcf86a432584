"""Make a repository for Hugging Face's Kernels Hub from the kernels of one GPU: python -m scripts.kernels_hub FOLDER

    kernels.get_local_kernel(Path(FOLDER)).flash_attn_func(q, k, v, causal=True)

FOLDER gets what the hub asks for: build.toml, the card, torch-ext/NAME for kernel-builder, and build/ with the variants
that it would make, which are loaded without it: sources in Python, the same for every GPU, and their digests. They
import the standard library, torch, the Triton that comes with it, and each other. Upload it with `kernel-builder
upload` or by git.
"""

from __future__ import annotations

if not __package__:
    raise SystemExit("start this as a module, in the repository's root: python -m scripts.kernels_hub")

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import ringattn
from ringattn.tools.terminal import Parser

ROOT = Path(__file__).parent.parent
BACKENDS = ("cpu", "cuda")  # on the CPU the specification runs, not compiled kernels
LEFT_OUT = ("paged",)  # folders of kernels/ that caches over ranks need
EXPORTS = "from .kernels.standalone import flash_attn_func, flash_attn_varlen_func"
NAMES = '__all__ = ["flash_attn_func", "flash_attn_varlen_func"]'
_RELATIVE = re.compile(r"^\s*from (\.+)(\w*) import ([\w, ]*)", re.M)

BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[general.hub]
repo-id = "{repository}"

[torch-noarch]
"""

FLAKE = """{{
  description = "{name}";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = {{ self, kernel-builder }}: kernel-builder.lib.genKernelFlakeOutputs {{ inherit self; path = ./.; }};
}}
"""

CARD = """---
license: apache-2.0
tags: [kernels]
---

# {name}

flash-attn's functions on the kernels of ringattn {release}: Gluon for sm_90, Triton for other GPUs. Full, causal,
windows, documents, GQA, head dims of values of their own, softcap, ALiBi, lse and its gradient.

```python
from kernels import get_kernel

attention = get_kernel("{repository}", version={version}, trust_remote_code=True)
out = attention.flash_attn_func(q, k, v, causal=True)
```

Needs Python 3.11 and torch 2.11. There is no dropout, and no paged cache.
"""


def sources() -> dict[str, bytes]:
    """Return the files of the package, by path: kernels/, in the same place as in ringattn, and the modules of ringattn
    that they import."""
    folder = ROOT / "kernels"
    files = {path.relative_to(ROOT): path for path in sorted(folder.rglob("*.py"))}
    files = {name: path for name, path in files.items() if name.parts[1] not in LEFT_OUT}
    waiting = [*files]
    for name in waiting:  # it grows
        for dots, module, imported in _RELATIVE.findall(files[name].read_text()):
            above = len(dots) - len(name.parts)  # the package: 0
            if above > 0:
                raise ValueError(f"{name} imports from above the package")
            for other in (module or imported).replace(" ", "").split(",") if above == 0 else ():
                if (path := ROOT / "ringattn" / f"{other}.py").exists() and Path(path.name) not in files:
                    files[Path(path.name)] = path
                    waiting.append(Path(path.name))
    package = f'"""{ringattn.__name__} {ringattn.__version__}: attention on one GPU."""\n\n{EXPORTS}\n\n{NAMES}\n'
    texts = {name.as_posix(): path.read_bytes() for name, path in files.items()}
    return {"__init__.py": package.encode(), **texts, "kernels/__init__.py": b""}


def metadata(name: str, version: int, backend: str, files: dict[str, bytes]) -> dict[str, object]:
    """Return what ``kernels`` reads of a variant. The id is that of its sources: two may be loaded at once."""
    digests = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in sorted(files.items())}
    whole = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:8]
    module = name.replace("-", "_")
    kind: dict[str, object] = {"type": backend}
    if backend == "cuda":
        kind["archs"] = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
    return {
        "name": name, "id": f"_{module}_{backend}_{whole}", "version": version, "license": "Apache-2.0",
        "python-depends": [], "backend": kind, "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip


def write(folder: Path, repository: str, version: int) -> None:
    """Write the repository into an empty or new folder.

    Raises:
        FileExistsError: there is something else in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder")
    name = repository.rsplit("/", 1)[-1]
    module, files = name.replace("-", "_"), sources()
    values = dict(name=name, repository=repository, version=version, release=ringattn.__version__)
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    written: dict[str, bytes] = {
        "build.toml": BUILD.format(backends=backends, **values).encode(), "flake.nix": FLAKE.format(**values).encode(),
        "README.md": CARD.format(**values).encode(), "CARD.md": CARD.format(**values).encode(),
    }  # fmt: skip
    written |= {f"torch-ext/{module}/{path}": data for path, data in files.items()}
    # For versions of kernels that look for a package in the variant.
    compatible = f"from .. import flash_attn_func, flash_attn_varlen_func\n\n{NAMES}\n".encode()
    for backend in BACKENDS:
        variant = {**files, f"{module}/__init__.py": compatible}
        text = json.dumps(metadata(name, version, backend, variant), indent=2)
        variant["metadata.json"] = f"{text}\n".encode()
        written |= {f"build/torch-{backend}/{path}": data for path, data in variant.items()}
    for path, data in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    shutil.copy(ROOT / "LICENSE", folder)


def main() -> None:
    parser = Parser("scripts.kernels_hub", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", default="ringattn/ringattn-kernels", help="OWNER/NAME on the hub")
    parser.add_argument("--version", type=int, default=0, help="of its functions; 0 while they may change")
    options = parser.parse_args()
    write(options.folder, options.repository, options.version)
    print(f"{options.folder}: {options.repository}, version {options.version}")


if __name__ == "__main__":
    main()
