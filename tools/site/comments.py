"""A griffe extension: a comment behind a field documents it, as the sources have it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"^[^#]*?\s#\s+(.*)$")


def comment_of(attribute: griffe.Attribute) -> str:
    """The comment on the attribute's line; empty: there is none, or it is for tools."""
    source = attribute.source.splitlines()
    found = _COMMENT.match(source[-1]) if source else None
    return "" if found is None or found[1].startswith(("noqa", "type:")) else found[1]


class Comments(griffe.Extension):
    """Gives such attributes a docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Called by griffe for each."""
        if attr.docstring is None and (text := comment_of(attr)):
            attr.docstring = griffe.Docstring(text, parent=attr)
