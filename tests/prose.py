"""Text that any machine has: the language reference within `pydoc` as prose, the standard library's sources as code."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path

OTHER = re.compile(r"::=|>>>|\||\+--|===")
"""Grammar, sessions and tables."""
NAVIGATION = "Home Products About Contact Login Search Cart Account Terms Privacy Policy Sitemap Next Previous Index Download".split()


@cache
def prose() -> tuple[str, ...]:
    """Groups of paragraphs, of about 150 words of running English, in a fixed order: some 40,000 words or more."""
    from pydoc_data.topics import topics

    sources = [topics[name] for name in sorted(topics)] + ["\n\n".join(docstrings(text)) for _, text in code()]
    documents: list[str] = []
    for source in sources:
        group: list[str] = []
        for paragraph in re.split(r"\n\s*\n", source):
            if len(paragraph.split()) <= 20 or OTHER.search(paragraph):
                continue
            group.append(re.sub(r"[*`]", "", paragraph))
            if sum(len(part.split()) for part in group) > 150:
                documents.append("\n\n".join(group))
                group = []
    return tuple(dict.fromkeys(documents))


def docstrings(text: str) -> list[str]:
    """The documentation within a Python file; none if this Python cannot read it."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]


def shuffled(text: str, seed: int) -> str:
    """The words of `text` in another order."""
    words = text.split()
    random.Random(seed).shuffle(words)
    return " ".join(words)


def navigation(seed: int, words: int = 150) -> str:
    """A menu."""
    rng = random.Random(seed)
    return " ".join(rng.choice(NAVIGATION) for _ in range(words))


@cache
def code() -> tuple[tuple[str, str], ...]:
    """(file name, text) of the modules at the top of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return tuple((file.name, file.read_text(encoding="utf-8", errors="replace")) for file in files)
