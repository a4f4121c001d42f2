"""The text of HTML pages, by the standard library's parser: tags, scripts, styles and navigation left out."""

from __future__ import annotations

import re
from html.parser import HTMLParser

SILENT = {"script", "style", "nav", "head", "footer", "svg", "button", "form", "template"}
BLOCK = set(
    "address article aside blockquote br dd div dl dt fieldset figure h1 h2 h3 h4 h5 h6 header hr li main ol p pre section "
    "table tr ul".split()
)
BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+\n")
WHITESPACE = re.compile(r"\s+")


class _Text(HTMLParser):
    """Collects text outside of elements in `SILENT`, which nest."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.silent = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.silent = 0  # </head> may be left out
        elif tag in SILENT:
            self.silent += 1
        elif tag in BLOCK:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")
        if tag == "pre":
            self.preformatted += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCK:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in SILENT:
            self.silent = max(0, self.silent - 1)
        elif tag in BLOCK:
            self.parts.append("\n")
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.parts.append(data if self.preformatted else WHITESPACE.sub(" ", data))


def strip_html(markup: str) -> str:
    """The text of a page: one line for each block element, at most one blank line in a row, one newline at the end."""
    parser = _Text()
    parser.feed(markup)
    parser.close()
    lines = (line.rstrip() for line in "".join(parser.parts).split("\n"))
    return BLANK_LINES.sub("\n\n", "\n".join(lines)).strip() + "\n"
