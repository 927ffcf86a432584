"""Hooks of mkdocs.yml: pages that lie outside of docs/, the page of all public names, and links to files that are no pages.

README.md, CHANGELOG.md and others stay where GitHub looks for them; the site reads them from there. Links in all pages
are written for the repository. On the site a link to a page leads to that page, a link to another file of the
repository leads to ``repo_url``, and becomes plain text as long as the repository has no address.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site: file of the repository
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "kernels.md": "kernels/NOTES.md",
}
# Public modules of ringattn, in the order of the page, and where the names of each are listed
MODULES = ("ringattn", "ringattn.mask", "ringattn.batch", "ringattn.loss", "ringattn.flash", "ringattn.hf", "ringattn.errors")
# A link, or code, in which there are none
_LINK_OR_CODE = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
    r"|```.*?```|~~~.*?~~~|`[^`\n]*`",
    re.S,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and the reference."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "api.md", content=reference()))
    return files


def public_names(module: str) -> list[str]:
    """Return the names that a module exports, in the order of its source: what it defines, and what it imports ``as``
    the same name. Its public modules are left out."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
    return [name for name in names if not name.startswith("_") and f"{module}.{name}" not in MODULES]


def reference() -> str:
    """Return the page with every public name, for mkdocstrings."""
    parts = ["# API", "Shapes are (batch, tokens, heads, head_dim) unless a page says otherwise."]
    for module in MODULES:
        parts.append(f"## {module}")
        if module != "ringattn":
            parts.append(f"::: {module}\n    options: {{members: false, show_root_heading: false}}")
        parts += [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, except in code."""
    here = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK_OR_CODE.sub(lambda match: _link(match, here, page.file.src_uri, config, files), markdown)


def _link(match: re.Match[str], here: str, page: str, config: Any, files: Files) -> str:
    """Return one link as the site needs it, or code as it is. ``here`` is the file in the repository, ``page`` its page."""
    path, anchor = match["path"], match["anchor"] or ""
    if path is None or re.match(r"[a-z]+:", path):
        return match[0]
    anchor = re.sub(r"-(\d)$", r"_\1", anchor)  # the second of two equal headings: -1 on GitHub, _1 here
    if not path:
        return f"[{match['text']}]({anchor})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if not (ROOT / target).exists():
        return match[0]  # a warning of mkdocs follows, and so an error
    pages = {file: uri for uri, file in ELSEWHERE.items()}
    uri = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    file = files.get_file_from_path(uri) if uri else None
    if file and file.inclusion.is_included():
        relative = os.path.relpath(uri, posixpath.dirname(page) or ".")
        return f"{match['image']}[{match['text']}]({relative}{anchor})"
    if config.repo_url:
        return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{target}{anchor})"
    return match["text"]
