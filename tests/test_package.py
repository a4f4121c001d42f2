"""Importing octavo changes nothing, needs no GPU and loads no heavy library; the public names are there and documented."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parent.parent
HEAVY = (
    "transformers",
    "triton",
    "matplotlib",
    "rich",
    "tensorboard",
    "tokenizers",
    "safetensors",
    "pandas",
    "torch._inductor",
)

PROBE = """
import json, sys, warnings
import torch

def snapshot():
    modules = (torch, torch.Tensor, torch.nn.functional, torch.nn.Linear, torch.nn.Module, torch.optim.AdamW, torch.distributed)
    return {f"{m.__name__}.{k}": id(v) for m in modules for k, v in vars(m).items() if callable(v)}

before, default, hooks = snapshot(), torch.get_default_dtype(), len(torch.nn.modules.module._global_forward_hooks)
rng = torch.get_rng_state().clone()
loaded = set(sys.modules)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import octavo
after = snapshot()
print(json.dumps({
    "changed": [k for k in before if after.get(k) != before[k]],
    "default dtype kept": torch.get_default_dtype() == default,
    "no hooks": len(torch.nn.modules.module._global_forward_hooks) == hooks,
    "random state kept": torch.equal(torch.get_rng_state(), rng),
    "cuda untouched": not torch.cuda.is_initialized(),
    "loaded": sorted(set(sys.modules) - loaded),
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict:
    """What a new interpreter reports about `import octavo`."""
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def test_import_patches_nothing(fresh_import):
    assert fresh_import["changed"] == []
    for fact in ("default dtype kept", "no hooks", "random state kept", "cuda untouched"):
        assert fresh_import[fact], fact


def test_H6_import_loads_no_heavy_library(fresh_import):
    loaded = fresh_import["loaded"]
    assert [name for name in loaded if name.startswith(HEAVY)] == []


def test_public_names():
    assert sorted(octavo.__all__) == octavo.__all__ or len(set(octavo.__all__)) == len(octavo.__all__)
    for name in octavo.__all__:
        assert hasattr(octavo, name), name


def test_version_is_the_installed_one():
    assert importlib.metadata.version("octavo") == octavo.__version__


def test_console_script_points_at_a_function():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="octavo")
    assert script.value == "octavo.cli:main"
    assert callable(script.load())


@pytest.mark.parametrize("file", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "octavo").rglob("*.py")))
def test_modules_and_public_names_have_docstrings(file):
    tree = ast.parse((ROOT / file).read_text())
    assert ast.get_docstring(tree), f"{file} does not say what it is for"
    bare = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        # an operator is the function of the same name, which says what it does
        and not any(_makes_operator(decorator) for decorator in node.decorator_list)
    ]
    assert not bare, f"{file}: no docstring for {', '.join(bare)}"


def _makes_operator(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("operator", "torch.library.custom_op")


def test_every_module_has_its_tests():
    """`octavo/memory.py` has tests/test_memory.py; a package has at least one file for itself or for one of its modules."""
    tests = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    missing = []
    for path in (ROOT / "octavo").iterdir():
        if path.name.startswith(("_", "py.typed")):
            continue
        names = [path.stem, *(module.stem for module in path.glob("*.py") if module.stem != "__init__")]
        if not any(test.startswith(f"test_{name}") for test in tests for name in names):
            missing.append(path.name)
    assert not missing, f"no test file for {', '.join(sorted(missing))}"
