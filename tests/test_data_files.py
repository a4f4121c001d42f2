"""A file is written whole, replaces what was there, and leaves nothing beside it."""

import hashlib
import os

import pytest

from octavo.data.files import file_digest, write_whole


@pytest.mark.parametrize("content", ["ä\r\nb\n", b"\xff\r\n\x00", ""])
def test_content_is_kept_byte_by_byte(tmp_path, content):
    path = tmp_path / "a.json"
    for _ in range(2):
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["a.json"]


def test_digest_is_that_of_the_whole_file(tmp_path):
    content = os.urandom((1 << 20) + 7)
    (tmp_path / "a").write_bytes(content)
    for algorithm in ("sha256", "blake2b"):
        assert file_digest(tmp_path / "a", algorithm) == hashlib.new(algorithm, content).hexdigest()
