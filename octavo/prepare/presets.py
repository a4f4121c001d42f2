"""Corpora as functions: each returns a complete config, so a variant is a few overrides."""

from __future__ import annotations

from collections.abc import Callable

from octavo.prepare.config import PrepareConfig


def demo() -> PrepareConfig:
    """Documentation, code, dialogue, books and dictionaries from Debian and PyPI packages."""
    return PrepareConfig(out="corpora/demo", sources={})


PRESETS: dict[str, Callable[[], PrepareConfig]] = {"demo": demo}
