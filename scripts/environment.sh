# Sourced by demo, test and measure: changes to the repository's root and sets `python` to an interpreter that can run
# ringattn. The first of these that applies:
#
#   1. .venv, if it was made from the current pins;
#   2. python3, if it can import torch >= 2.11 and Triton >= 3.6. Nothing is installed then, so that offline machines work;
#   3. .venv, after making or updating it from scripts/requirements.txt.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
pins=scripts/requirements.txt

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Does this interpreter start, with a version that suits the pinned torch? Nothing is imported.
suits() {
    "$1" -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 14))' >/dev/null 2>&1
}

# Are torch and Triton installed and new enough? Reads their versions without an import, which takes seconds for torch.
has_torch() {
    "$1" - >/dev/null 2>&1 <<'PYTHON'
import sys
from importlib import metadata, util
def version(*names):
    for name in names:
        try:
            return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in metadata.version(name).split(".")[:2])
        except metadata.PackageNotFoundError:
            pass
    return (0, 0)
installed = all(util.find_spec(name) for name in ("torch", "triton", "numpy"))
sys.exit(not (installed and version("torch") >= (2, 11) and version("triton", "pytorch-triton") >= (3, 6)))
PYTHON
}

# Identifies what .venv is made from.
fingerprint() { { cat "$pins" pyproject.toml; say "$root"; } | cksum; }

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if suits "$name"; then command -v "$name"; return; fi
    done
    die "no Python 3.11 to 3.14 found (python3 is $(python3 --version 2>&1 || true)); install one, e.g. python3.12"
}

make_venv() {
    local base
    base=$(find_python)
    say "Setting up .venv with $("$base" --version) (once, 5 to 15 minutes; downloads torch: about 3 GB on Linux, with CUDA's libraries)"
    # With its own pip, or with that of `base` (Debian's python3 without python3-venv).
    local pip=(.venv/bin/python -m pip)
    if ! suits .venv/bin/python || ! "${pip[@]}" --version >/dev/null 2>&1; then
        rm -rf .venv
        if ! "$base" -m venv .venv >/dev/null 2>&1; then
            rm -rf .venv
            "$base" -m pip --version >/dev/null 2>&1 ||
                die "$base cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"
            "$base" -m venv --without-pip .venv
            pip=("$base" -m pip --python .venv/bin/python)
        fi
    fi
    local options=(--disable-pip-version-check)
    [[ -t 1 ]] || options+=(-qq) # progress bars in a terminal, only errors in a log
    "${pip[@]}" install "${options[@]}" -r "$pins" ||
        die "pip could not install $pins; offline, use a python3 that has torch >= 2.11, Triton >= 3.6 and numpy"
    if [[ $(uname) == Linux ]] && ! .venv/bin/python -c 'import triton' 2>/dev/null; then
        "${pip[@]}" install "${options[@]}" "$(sed -n 's/^# TRITON //p' "$pins")"
    fi
    "${pip[@]}" install "${options[@]}" --no-deps --no-build-isolation -e .
    fingerprint >.venv/made-from
}

if [[ -x .venv/bin/python && $(cat .venv/made-from 2>/dev/null) == "$(fingerprint)" ]] && suits .venv/bin/python; then
    python=.venv/bin/python
elif suits python3 && has_torch python3; then
    python=$(command -v python3)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    say "Using $python, which has torch and Triton; nothing is installed"
else
    make_venv
    python=.venv/bin/python
fi

# Can this module be imported? For extras, which are pinned in .venv but may be missing elsewhere.
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }
