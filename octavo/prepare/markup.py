"""The text of documentation pages, by lxml: what a reader came for, without the navigation around it.

`octavo.data.html` strips tags from any page and needs nothing but the standard library. A corpus of documentation wants more:
thousands of pages carry the same menus, and they would teach a model menus. So here a page is a tree, and

1. if it marks its content (one `<main>`, `role="main"` or `<article>`), only that is read;
2. elements that are navigation go: by tag (`nav`, `aside`, `footer`, forms, scripts), by `role`, or by the words with which
   generators of documentation name them in `class` and `id` (`sidebar`, `navheader`, `breadcrumbs`, `toc`, …);
3. blocks of links go: lists, tables and rows with at least `MIN_LINKS` links that hold `LINK_SHARE` of their text.

The text of blocks stands on lines of its own, `<pre>` keeps its lines and spaces.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from octavo.data.html import BLANK_LINES, BLOCK, SILENT, WHITESPACE

DROPPED = SILENT | {"aside", "iframe", "noscript", "object", "select", "input", "textarea", "map", "dialog"}
ROLES = {"navigation", "banner", "contentinfo", "search", "menu", "menubar", "complementary"}
NAVIGATION = re.compile(
    r"(?:^|[\s_-])(?:nav|navi|side-?bar|sphinxsidebar|bread-?crumb|menu|foot(?:er)?(?:[\s_-]|$)|header-?link|anchorjs|related|"
    r"toc(?:[\s_-]|$|tree)|table-of-contents|top-?bar|skip|search|pagination|page-?header|editsection|printfooter|catlinks|line-?no|line-?num)",
    re.IGNORECASE,
)
LINK_BLOCKS = {"ul", "ol", "dl", "table", "tr", "p", "div", "center"}
MIN_LINKS = 3
LINK_SHARE = 0.8


class _Count(NamedTuple):
    """What an element holds: characters, those within links, and links."""

    size: int
    linked: int
    links: int


def page_text(page: str) -> str:
    """The text of an HTML page: at most one blank line in a row, one newline at the end; "" if nothing but navigation is left."""
    from lxml import etree

    parser = etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        root = etree.fromstring(page.encode(), parser=parser)
    except etree.XMLSyntaxError:  # nothing that could be an element
        return ""
    if root is None:
        return ""
    body = root.find("body")
    content = _content(root if body is None else body)
    parts: list[str] = []
    _collect(content, parts, False)
    lines = (line.rstrip() for line in "".join(parts).split("\n"))
    text = BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()
    return text + "\n" if text else ""


def _content(body: Any) -> Any:
    """The one element that the page marks as its content, or all of `body`."""
    for path in (".//main", './/*[@role="main"]', ".//article"):
        found = body.findall(path)
        if len(found) == 1:
            return found[0]
    return body


def _collect(element: Any, parts: list[str], preformatted: bool) -> _Count:
    """Appends the text of `element`; takes it back if it turns out to be a block of links. libxml2 bounds the depth to 256."""
    tag = element.tag
    start = len(parts)
    if tag in BLOCK:
        parts.append("\n")
    elif tag in ("td", "th"):
        parts.append("\t")
    preformatted = preformatted or tag == "pre"
    size = _append(element.text, parts, preformatted)
    linked = links = 0
    for child in element:
        name = child.tag
        if (
            isinstance(name, str)
            and name not in DROPPED
            and not _is_navigation(child.get("role"), child.get("class"), child.get("id"))
        ):
            count = _collect(child, parts, preformatted)
            size, linked, links = size + count.size, linked + count.linked, links + count.links
        size += _append(child.tail, parts, preformatted)
    if tag in BLOCK:
        parts.append("\n")
    if tag == "a" and element.get("href") is not None:
        return _Count(size, size, 1)
    if tag in LINK_BLOCKS and links >= MIN_LINKS and linked >= LINK_SHARE * size:
        del parts[start:]
        parts.append("\n")
        return _Count(0, 0, 0)
    return _Count(size, linked, links)


def _append(piece: str | None, parts: list[str], preformatted: bool) -> int:
    """Appends a piece of text, if there is one. Returns its length without outer white space."""
    if not piece:
        return 0
    parts.append(piece if preformatted else WHITESPACE.sub(" ", piece))
    return len(piece.strip())


@lru_cache(maxsize=4096)
def _is_navigation(role: str | None, classes: str | None, name: str | None) -> bool:
    return role in ROLES or any(NAVIGATION.search(value) is not None for value in (classes, name) if value)
