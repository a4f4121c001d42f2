"""Every Python snippet of the README and of the documentation runs, and every file, test and name that they mention exists."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = sorted(["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
RUN = ("README.md", "docs/guide.md")


def snippets(page: str) -> list[tuple[int, str]]:
    """(line number, source) of each Python block."""
    text = (ROOT / page).read_text()
    return [(text[: m.start()].count("\n") + 2, m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]


class LossModel(nn.Module):
    """The reader's own model in the README: its output has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor):
        return type("Output", (), {"loss": (self.layers(x) - x).square().mean()})()


@pytest.mark.parametrize("page", RUN)
def test_snippets_run(page, tmp_path, monkeypatch, seed):
    """The blocks of one page share a namespace, in order, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "snippets"}
    if page == "README.md":
        model = LossModel()
        namespace |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "x": torch.randn(32, 64)}
    blocks = snippets(page)
    assert blocks
    for line, source in blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                exec(compile("\n" * (line - 1) + source, str(ROOT / page), "exec"), namespace)
            except Exception as error:
                error.add_note(f"in the snippet at {page}:{line}") if hasattr(error, "add_note") else None
                raise


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, f"{page}: no heading for {target}"
        elif "://" not in target:
            assert ((ROOT / page).parent / target.split("#")[0]).exists(), f"{page}: {target} does not exist"


@pytest.mark.parametrize("page", PAGES)
def test_mentioned_tests_exist(page):
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    names = set(re.findall(r"^ *(?:def|class) (test_\w+|Test\w+)", sources, re.M))
    files = {path.stem for path in (ROOT / "tests").glob("*.py")}
    mentioned = set(re.findall(r"`(?:tests/\w+\.py::)?(test_\w+)`", (ROOT / page).read_text()))
    assert mentioned <= names | files, f"{page} mentions {sorted(mentioned - names - files)}"


@pytest.mark.parametrize("page", PAGES)
def test_mentioned_files_exist(page):
    text = re.sub(r"\*later\*.*", "", (ROOT / page).read_text())
    paths = set(re.findall(r"`((?:octavo|tests|docs|examples|benchmarks)/[\w./]+\.\w+)`", text))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
