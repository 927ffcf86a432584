"""The other libraries that measurements compare with: the versions that are installed.

python -m benchmarks.libraries        before a long run: which are missing, and how to install them
"""

from __future__ import annotations

from importlib import metadata

from ringattn.tools.terminal import Parser

# How pip installs them. Those that compile for minutes or need CUDA's compiler are worth it before a GPU is rented.
INSTALL = {
    "transformers": "transformers accelerate",
    "ring-flash-attn": "--no-deps ring-flash-attn",
    "transformer-engine": "--no-build-isolation 'transformer-engine[pytorch]'",
    "flash-attn": "--no-build-isolation flash-attn",
    "fa3-fwd": "fa3-fwd",
    "flash-attn-4": "flash-attn-4",
    "flashinfer-python": "flashinfer-python",
    "tileops": "tileops",
    "nvidia-cudnn-frontend": "nvidia-cudnn-frontend",
}


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    there = {}
    for name in INSTALL:
        try:
            there[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return there


def main() -> None:
    Parser("benchmarks.libraries", __doc__).parse_args()
    there = versions()
    print(f"Libraries to compare with: {', '.join(f'{name} {version}' for name, version in there.items()) or 'none'}")
    for name, install in INSTALL.items():
        if name not in there:
            print(f"  missing: {name}; pip install {install}")


if __name__ == "__main__":
    main()
