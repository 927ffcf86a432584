"""Writes idea.ipynb, which is idea.md with its examples as cells that can be run.

    python -m docs.start.idea.notebook

Never edit the notebook: tests/test_idea.py compares it with this script's result.
"""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def markdown_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}


def code_cells(session: str) -> list[dict[str, Any]]:
    """Return the cells of a ``pycon`` block. A cell ends after each statement that has an output."""
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(session):
        source += example.source
        if example.want:
            cells.append(code_cell(source, example.want))
            source = ""
    return [*cells, code_cell(source)] if source else cells


def code_cell(source: str, result: str = "") -> dict[str, Any]:
    text = {"text/plain": result.strip().splitlines(keepends=True)}
    output = {"data": text, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [output] if result else [],
        "source": source.strip().splitlines(keepends=True),
    }


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page: its ``pycon`` blocks as code cells, all else as markdown cells."""
    cells: list[dict[str, Any]] = []
    for index, part in enumerate(re.split(r"```pycon\n(.*?)```", page, flags=re.DOTALL)):
        cells += code_cells(part) if index % 2 else [markdown_cell(part)]
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text() -> str:
    """Return the text of idea.ipynb."""
    return json.dumps(notebook((FOLDER / "idea.md").read_text()), ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    (FOLDER / "idea.ipynb").write_text(text())
