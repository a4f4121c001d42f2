"""Rules for source code, as in appendix A.3 of FP8-LM: alphanumeric rate, number of lines, line length, keywords.

A file of data in code's clothes has few letters and digits (tables of bytes have few letters), one huge line (minified or
generated), hardly a line at all, or none of the words that programs of its language consist of. The language follows from the
file's suffix; a suffix that no language here claims is judged without keywords.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from octavo.prepare.steps import KindFilter

_C = "if for while return struct typedef void int char static include define enum extern const"
LANGUAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "Python": ((".py", ".pyi", ".pyx"), "def class import from return for while if lambda with"),
    "C": ((".c", ".h"), _C),
    "C++": (
        (".cc", ".cpp", ".cxx", ".hpp", ".hh", ".hxx", ".cu", ".cuh"),
        f"{_C} class namespace template using public",
    ),
    "Java": ((".java",), "class interface enum package import public return void new"),
    "Kotlin": ((".kt", ".kts"), "fun val var class object import package return"),
    "Scala": ((".scala",), "def val var class object trait import package"),
    "C#": ((".cs",), "class interface struct enum namespace using public return void"),
    "JavaScript": ((".js", ".mjs", ".cjs", ".jsx"), "function const let var return import export class if for"),
    "TypeScript": ((".ts", ".tsx"), "function const let var return import export class interface type if for"),
    "Go": ((".go",), "package func import type struct return var const"),
    "Rust": ((".rs",), "fn let mod use impl struct enum trait pub const"),
    "Swift": ((".swift",), "func let var class struct enum protocol import return"),
    "Ruby": ((".rb",), "def class module end require do if return"),
    "Perl": ((".pl", ".pm"), "sub my use package our return if foreach"),
    "PHP": ((".php",), "function class echo return if foreach namespace use"),
    "Lua": ((".lua",), "function local end return if for then"),
    "R": ((".r",), "function library if for return else"),
    "Julia": ((".jl",), "function end using module struct return if for"),
    "Haskell": ((".hs",), "module where import data type let case instance"),
    "OCaml": ((".ml", ".mli"), "let val type module open match fun"),
    "Erlang": ((".erl", ".hrl"), "module export case end when receive define record"),
    "Lisp": ((".el", ".lisp", ".clj", ".scm"), "defun defvar defmacro define let lambda defn ns setq"),
    "Fortran": ((".f90", ".f"), "program subroutine function module integer real end do"),
    "Assembly": ((".s", ".asm"), "mov move ldr str jmp ret call push globl section text include define add"),
    "Shell": ((".sh", ".bash"), "if then fi for do done echo case export exit set"),
    "SQL": ((".sql",), "select insert create update delete table from"),
    "Makefile": ((".mk",), "include ifeq ifdef endif all clean obj install PHONY"),
    "CMake": ((".cmake",), "set if endif include function macro add_executable project"),
}
"""Language → (suffixes, words of which a program has at least one)."""

SUFFIXES: dict[str, str] = {suffix: language for language, (suffixes, _) in LANGUAGES.items() for suffix in suffixes}
KEYWORDS = {
    language: re.compile(rf"\b(?:{'|'.join(words.split())})\b", re.IGNORECASE if language in ("SQL", "Fortran") else 0)
    for language, (_, words) in LANGUAGES.items()
}
GENERATED = re.compile(
    r"@generated|do not (?:edit|modify)|auto[- ]?generated|automatically generated|generated automatically|"
    r"this file (?:was|is|has been) generated",
    re.IGNORECASE,
)
HEAD = 1000
"""Characters at the beginning of a file in which a generator names itself."""
MINIFIED = 300
"""Characters per line, on average, of a file without line breaks to speak of."""
ALPHANUMERIC = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class CodeRules:
    """Bounds, all inclusive."""

    min_alphanumeric: float = 0.25
    """Share of letters and digits among all characters."""
    min_letters: float = 0.15
    """Share of letters among all characters: tables of numbers have fewer."""
    min_lines: int = 5
    """Lines that are not blank."""
    max_line_length: int = 1000
    """Characters of the longest line."""
    max_mean_line_length: float = 100.0
    """Mean over the lines that are not blank."""
    keywords: bool = True
    """Ask for a keyword of the language."""

    def __post_init__(self) -> None:
        if not (0 <= self.min_alphanumeric <= 1 and 0 <= self.min_letters <= 1):
            raise ValueError(
                f"code rules ask for {self.min_alphanumeric} alphanumeric characters and {self.min_letters} letters: "
                "shares lie between 0 and 1"
            )


class CodeFilter(KindFilter):
    """Drops documents of the kind "code" that break a rule; all others pass."""

    name = "code"

    def __init__(self, rules: CodeRules | None = None, exclusion_writer: DiskWriter | None = None) -> None:
        super().__init__(("code",), exclusion_writer)
        self.rules = rules or CodeRules()

    def reason(self, doc: Document) -> str | None:
        return code_quality(doc.text, language_of(str(doc.metadata.get("path", ""))), self.rules)


def language_of(path: str) -> str | None:
    """The programming language of a file by its suffix, "x.py.gz" included; None if unknown."""
    name = path.lower()
    for compression in (".gz", ".xz", ".zst"):
        name = name.removesuffix(compression)
    return SUFFIXES.get(PurePosixPath(name).suffix)


def machine_made(text: str) -> tuple[str, str] | None:
    """("generated" or "minified", what shows it) for a file that no person wrote; None otherwise."""
    head = text[:HEAD]
    if match := GENERATED.search(head):
        return "generated", f"it says {' '.join(match.group().split())!r}"
    lines = text.count("\n") + 1
    if len(text) > 2000 and len(text) > MINIFIED * lines:
        return "minified", f"{len(text):,} characters in {lines:,} lines"
    return None


def code_quality(text: str, language: str | None, rules: CodeRules) -> str | None:
    """The first rule that `text` breaks, or None. `language`: a key of `LANGUAGES`, or None for any."""
    lengths = [len(line) for line in text.split("\n") if line and not line.isspace()]
    if len(lengths) < max(1, rules.min_lines):
        return "few_lines"
    if max(lengths) > rules.max_line_length:
        return "long_line"
    if sum(lengths) > rules.max_mean_line_length * len(lengths):
        return "long_lines"
    runs = ALPHANUMERIC.findall(text)
    if sum(map(len, runs)) < rules.min_alphanumeric * len(text):
        return "alphanumeric"
    if sum(len(run) for run in runs if not run[0].isdigit()) < rules.min_letters * len(text):
        return "few_letters"
    if rules.keywords and language is not None and not KEYWORDS[language].search(text):
        return "no_keyword"
    return None
