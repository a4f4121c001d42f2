"""A module imports only from the layers below its own, so that each can be read, tested and replaced without those above it.

The order is checked on the syntax tree, which also sees imports inside functions and under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = (
    "formats",
    "recipe",
    "settings",
    "kernels",
    "scaling",
    "tensor",
    "linear",
    "optim",
    "memory",
    "convert",
    "distributed",
    "models",
    "data",
    "prepare",
    "hf",
    "train",
    "plan",
    "evaluate",
    "reproduce",
    "bench",
    "doctor",
    "cli",
)
UPWARD: dict[tuple[str, str], str] = {}
"""Imports of a higher layer that are wanted: (importing file, imported module) → reason."""

PACKAGE = Path(__file__).parent.parent / "octavo"
FILES = sorted(
    path.relative_to(PACKAGE.parent).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).as_posix() not in ("__init__.py", "__main__.py")  # these two stand above all layers
)


def layer(module: str) -> int:
    """Index of the layer that holds a module, such as 'octavo.kernels.cast'."""
    return LAYERS.index(module.split(".")[1])


def imports(tree: ast.AST, module: str, is_package: bool) -> list[str]:
    """Full names of all octavo modules that the syntax tree of `module` imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            # `from octavo import kernels` imports a module of the package, not the package's own names
            found += [f"octavo.{alias.name}" for alias in node.names] if base == "octavo" else [base]
    return [name for name in found if name == "octavo" or name.startswith("octavo.")]


def module_name(file: str) -> tuple[str, bool]:
    """Dotted name of a file, and whether it is a package."""
    parts = file.removesuffix(".py").split("/")
    return (".".join(parts[:-1]), True) if parts[-1] == "__init__" else (".".join(parts), False)


@pytest.mark.parametrize("file", FILES)
def test_imports_go_down(file):
    module, is_package = module_name(file)
    tree = ast.parse((PACKAGE.parent / file).read_text())
    wrong = []
    for name in imports(tree, module, is_package):
        if name == "octavo.__version__":
            continue  # set before the package imports anything
        if name == "octavo" or name.split(".")[1] not in LAYERS:
            wrong.append(f"{name}: import the defining module, not the package")
        elif layer(name) > layer(module) and (file, name) not in UPWARD:
            wrong.append(f"{name}: a higher layer")
    assert not wrong, f"{file} imports {'; '.join(wrong)}"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("octavo/kernels/reference/")])
def test_references_stand_alone(file):
    """The reference is the specification of the CUDA kernels, so it may use none of them."""
    module, is_package = module_name(file)
    tree = ast.parse((PACKAGE.parent / file).read_text())
    allowed = ("octavo.formats", "octavo.kernels.reference")
    assert [name for name in imports(tree, module, is_package) if not name.startswith(allowed)] == []


def test_every_layer_exists_and_every_file_has_one():
    assert {module_name(file)[0].split(".")[1] for file in FILES} == set(LAYERS)


def test_exceptions_are_in_use():
    """An exception that no import needs any more is removed from the list."""
    for file, name in UPWARD:
        module, is_package = module_name(file)
        assert name in imports(ast.parse((PACKAGE.parent / file).read_text()), module, is_package)


def test_import_finder():
    source = """
import octavo.linear
from octavo import kernels, formats as f
from octavo.optim import AdamW
def lazy():
    from ..tensor import ScaledTensor
    from . import gemm
    import torch
"""
    expected = [
        "octavo.linear",
        "octavo.kernels",
        "octavo.formats",
        "octavo.optim",
        "octavo.tensor",
        "octavo.kernels",
    ]
    assert sorted(imports(ast.parse(source), "octavo.kernels.cast", False)) == sorted(expected)
    package = ast.parse("from . import cast\nfrom .. import recipe")
    assert imports(package, "octavo.kernels", True) == ["octavo.kernels", "octavo.recipe"]
