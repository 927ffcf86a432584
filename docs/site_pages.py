"""Hooks of mkdocs.yml: pages that lie outside of docs/, and links to files that are no pages.

README.md, CHANGELOG.md and others stay where GitHub looks for them; the site reads them from there. Modules that are
written to be read are pages, too: the docstring as text, then the code. Links in all pages are written for the
repository. On the site a link to a page leads to that page, a link to another file of the
repository leads to ``repo_url``, and becomes plain text as long as the repository has no address.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

from docs.site_reference import ROOT, reference

# Page of the site: file of the repository
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "code/streaming.md": "docs/start/idea/streaming.py",
    "code/partial.md": "ringattn/partial.py",
    "code/ring.md": "ringattn/dataflow/ring.py",
}
# Pages that a search finds after the others: they repeat words of the manual in every paragraph
_LATER = ("lab/", "why/scaling/", "code/", "numbers.md", "map.md", "changelog.md")
# A link, or code, in which there are none
_LINK_OR_CODE = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
    r"|```.*?```|~~~.*?~~~|`[^`\n]*`",
    re.S,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and the reference."""
    for page, path in ELSEWHERE.items():
        source = (ROOT / path).read_text()
        files.append(File.generated(config, page, content=listing(path, source) if path.endswith(".py") else source))
    files.append(File.generated(config, "reference/api.md", content=reference()))
    return files


def listing(path: str, source: str) -> str:
    """Return a module as a page: its docstring as text, then its code, with its ``# --- sections ---`` as headings."""
    statement, *_ = ast.parse(source).body
    text = ast.get_docstring(ast.parse(source)) or ""
    code = "\n".join(source.splitlines()[statement.end_lineno :]).strip("\n")
    start, *sections = re.split(r"^# --- (.*?) -{3,}\n", code, flags=re.M)
    parts = [f"# {posixpath.basename(path)}", f"`{path}`", text.replace("::\n", ":\n"), _fenced(start)]
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        parts += [f"## {heading}", _fenced(body)]
    return "\n\n".join(parts) + "\n"


def _fenced(code: str) -> str:
    body = code.strip("\n")
    return f"~~~python\n{body}\n~~~"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, except in code, and say how its finds are ranked in a search."""
    if page.file.src_uri.startswith(_LATER):
        page.meta["search"] = {"boost": 1e-5}  # a word in a title counts as 1,000 in the text
    here = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK_OR_CODE.sub(lambda match: _link(match, here, page.file.src_uri, config, files), markdown)


def _link(match: re.Match[str], here: str, page: str, config: Any, files: Files) -> str:
    """Return a link as the site needs it, or code as it is. ``here`` is a file of the repository, ``page`` its page."""
    path, anchor = match["path"], match["anchor"] or ""
    if path is None or re.match(r"[a-z]+:", path):
        return match[0]
    anchor = re.sub(r"-(\d)$", r"_\1", anchor)  # the second of two equal headings: -1 on GitHub, _1 here
    text = _LINK_OR_CODE.sub(lambda inner: _link(inner, here, page, config, files), match["text"])  # a linked picture
    if not path:
        return f"[{text}]({anchor})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if not (ROOT / target).exists():
        return match[0]  # a warning of mkdocs follows, and so an error
    pages = {file: uri for uri, file in ELSEWHERE.items()}
    uri = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    file = files.get_file_from_path(uri) if uri else None
    if file and file.inclusion.is_included():
        relative = os.path.relpath(uri, posixpath.dirname(page) or ".")
        return f"{match['image']}[{text}]({relative}{anchor})"
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target}{anchor})"
    return text
