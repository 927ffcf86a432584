"""An extension of griffe for mkdocs.yml: docstrings as Markdown. Roles of reStructuredText and doctests become code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:mod|func|meth|class|attr|data|exc):`[~.]*([\w.]+)`")
_DOCTEST = re.compile(r"(?:^>>> .*\n)(?:^.*\S.*\n?)*", re.M)


class Markdown(Extension):
    """Writes ``:func:`.plan``` as ```plan```, and puts fences around doctests, whose output may begin with ``#``."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
