"""HTML that cannot but be escaped: text becomes markup in one place."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Child: TypeAlias = "str | Sequence[Child] | None"


def el(tag: str, attributes: Mapping[str, object], *children: Child) -> Html:
    """An element.  Children that are no Html are text; attributes that are None are left out."""
    given = "".join(
        f' {name}="{text(str(value))}"' for name, value in attributes.items() if value is not None
    )
    return Html(f"<{tag}{given}>{_inside(children)}</{tag}>")


def lone(tag: str, attributes: Mapping[str, object]) -> Html:
    """An element that has no end tag and no children."""
    return Html(el(tag, attributes).removesuffix(f"</{tag}>"))


def text(words: str) -> Html:
    """Words as they are: characters that would not show, or would move others about, are spelt
    out."""
    return Html(escape("".join(map(_visible, words)), quote=True))


def _visible(character: str) -> str:
    """Controls, bidirectional and other format characters, surrogates and the like by number."""
    if character in "\n\t" or unicodedata.category(character)[0] != "C":
        return character
    return f"\\u{{{ord(character):x}}}"


def _inside(children: Child) -> str:
    if children is None:
        return ""
    if isinstance(children, Html):
        return children
    if isinstance(children, str):
        return text(children)
    return "".join(map(_inside, children))
