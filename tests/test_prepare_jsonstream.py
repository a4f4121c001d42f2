"""Values come out of a JSON file of any shape as the whole-file decoder gives them; bad ones are named and passed over."""

from __future__ import annotations

import io
import json
import random
import string

import pytest

from octavo.prepare import jsonstream
from octavo.prepare.jsonstream import json_values

LIMIT = 1 << 20


def values(text, limit=LIMIT):
    return list(json_values(io.BytesIO(text if isinstance(text, bytes) else text.encode()), limit))


def reasons(found):
    return [value.args[0] if isinstance(value, ValueError) else value for value in found]


def random_value(rng, depth=0):
    kind = rng.choice(
        ["string", "number", "list", "object", "constant"] if depth < 3 else ["string", "number", "constant"]
    )
    if kind == "string":
        return "".join(rng.choice(string.printable + '"\\[]{},:äß😀') for _ in range(rng.randrange(30)))
    if kind == "number":
        return rng.choice([rng.randrange(-1000, 1000), rng.random()])
    if kind == "list":
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == "object":
        return {str(i): random_value(rng, depth + 1) for i in range(rng.randrange(4))}
    return rng.choice([True, False, None])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_arrays_and_sequences_of_any_values(seed, chunk, monkeypatch):
    monkeypatch.setattr(jsonstream, "CHUNK", chunk)
    rng = random.Random(seed)
    wanted = [random_value(rng) for _ in range(rng.randrange(1, 12))]
    ascii_only, indent = rng.random() < 0.5, rng.choice([None, 2])
    assert values(json.dumps(wanted, ensure_ascii=ascii_only, indent=indent)) == wanted
    objects = [{"value": value} for value in wanted]
    assert values("\n".join(json.dumps(value) for value in objects)) == objects


def test_shapes():
    assert values("") == values("[]") == values(" [ ] ") == []
    assert values(b"\xef\xbb\xbf[1, 2]") == [1, 2]
    assert values('{"a": 1}') == [{"a": 1}]


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_every_truncation_keeps_the_whole_values_before_it(chunk, monkeypatch):
    monkeypatch.setattr(jsonstream, "CHUNK", chunk)
    wanted = [{"text": 'a "quoted" [text]'}, {"text": "b\\"}, {"text": "c", "more": [1, {"x": "}"}]}]
    text = json.dumps(wanted)
    for length in range(1, len(text)):
        found = values(text[:length])
        good = [value for value in found if not isinstance(value, ValueError)]
        assert good == wanted[: len(good)]
        assert len(good) == sum(text.index(json.dumps(value)) + len(json.dumps(value)) <= length for value in wanted)
        assert len(found) - len(good) <= 1
        assert all("breaks off" in value.args[1] for value in found[len(good) :])


@pytest.mark.parametrize("bad", ['{"a": nope}', '{"a" 1}', "nope", '{"a": [1, }', "{'a': 1}"])
def test_bad_value_between_good_ones(bad):
    text = f'[{{"text": "first"}}, {bad}, {{"text": "last"}}]'
    if bad == '{"a": [1, }':  # its list never closes, so the file's end closes it
        assert reasons(values(text))[:2] == [{"text": "first"}, "not_json"]
    else:
        assert reasons(values(text)) == [{"text": "first"}, "not_json", {"text": "last"}]


def test_value_longer_than_the_limit_is_passed_over_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(jsonstream, "CHUNK", 1 << 10)

    class Endless(io.RawIOBase):
        """[{"text": "first"}, {"text": "xxx…"}, {"text": "last"}] with 10 MB of x."""

        def __init__(self):
            self.pieces = iter(
                [b'[{"text": "first"}, {"text": "', *[b'x\\"[{' * 250] * 8_000, b'"}, {"text": "last"}]']
            )
            self.rest = b""
            self.most = 0

        def read(self, size=-1):
            self.most = max(self.most, size)
            while len(self.rest) < size and (piece := next(self.pieces, None)) is not None:
                self.rest += piece
            data, self.rest = self.rest[:size], self.rest[size:]
            return data

    file = Endless()
    assert reasons(json_values(file, 20_000)) == [{"text": "first"}, "too_long", {"text": "last"}]
    assert file.most <= 100_000


def test_wrong_encoding_ends_the_file_with_its_reason():
    found = values(b'[{"text": "first"}, {"text": "' + b'\xff\xfe"}]')
    assert reasons(found)[-1] == "encoding"
