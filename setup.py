"""The long description of the package: README.md with links that also lead somewhere on a package index.

Everything else is in pyproject.toml. README.md is written for the repository, so its links are relative. Here they
become links into the repository at ``[project.urls] Repository``, at the tag of the version. Without such an address
links become plain text and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?![a-z]+:)([^)]*)\)")


def description(readme: str, address: str | None, version: str) -> str:
    """Return ``readme`` with absolute links, or without its relative links if the repository has no ``address``."""

    def link(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        text = _LINK.sub(link, text)  # a picture that is a link
        if address is None:
            return "" if picture else text
        return f"{picture}[{text}]({address.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{path})"

    blocks = re.split(r"(^```.*?^```$)", readme, flags=re.M | re.S)  # code has no links
    return "".join(block if block.startswith("```") else _LINK.sub(link, block) for block in blocks)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    (version,) = re.findall(r'^__version__ = "(.*)"', (ROOT / "ringattn" / "__init__.py").read_text(), re.M)
    setup(
        long_description=description((ROOT / "README.md").read_text(), urls.get("Repository"), version),
        long_description_content_type="text/markdown",
    )
