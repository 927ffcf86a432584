"""The list of mutants stays in step with the code, and the run tells a fault that is noticed from one that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Not an import of the package `tests`: the module is run as python -m tests.mutants.
ROOT = Path(__file__).parent.parent


def mutants() -> list:
    code = "import json; from tests.mutants import MUTANTS; print(json.dumps([m._asdict() for m in MUTANTS]))"
    import json

    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return json.loads(output)
