"""Each example runs from the command line, shows what it says it shows, and stays short enough to read at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(example: str) -> str:
    """Output of the example in a new interpreter, one thread on the CPU."""
    command = [sys.executable, str(ROOT / "examples" / example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_short_enough(example):
    assert len((ROOT / "examples" / example).read_text().splitlines()) <= 80


def test_plain_loop():
    output = run("plain_loop.py")
    first, *_, last = losses(output)
    assert first > 5 and last < 3.2
    assert re.search(r"^blocks\.0\.qkv: converted", output, re.M) and re.search(
        r"^head: backward converted", output, re.M
    )
    assert re.search(r"at 6\.0\d\d B each", output)


@pytest.mark.slow
def test_huggingface():
    output = run("huggingface.py")
    first, *_, last = losses(output)
    assert first > 5 and last < 3.7
    assert output.splitlines()[-1].endswith("identical")


def test_finetune():
    output = run("finetune.py")
    kept = {name: int(share) for name, share in re.findall(r"^(\S+) .*kept (-?\d+)%", output, re.M)}
    assert 90 <= kept["O2"] <= 110
    assert kept["paper"] < 80  # what rounding to nearest loses


def test_custom_recipe():
    output = run("custom_recipe.py")
    assert re.findall(r"^(\d): converted", output, re.M) == ["2", "4"]
    first, *_, last = losses(output)
    assert last < first


def test_resume():
    assert run("resume.py").splitlines()[-1].endswith("identical")
