"""Languages are told apart without a download, on a sample that covers the whole document."""

from __future__ import annotations

import copy
import pickle
import socket

import pytest
from datatrove.data import Document

from octavo.prepare.language import LanguageFilter, sample

TEXTS = {
    "en": "The committee met on Tuesday and decided that the bridge over the river would be repaired before the winter.",
    "de": "Der Ausschuss traf sich am Dienstag und beschloss, die Brücke über den Fluss vor dem Winter zu reparieren.",
    "fr": "Le comité s'est réuni mardi et a décidé que le pont sur la rivière serait réparé avant l'hiver prochain.",
    "es": "El comité se reunió el martes y decidió que el puente sobre el río sería reparado antes del invierno.",
    "ru": "Комитет собрался во вторник и решил, что мост через реку будет отремонтирован до наступления зимы.",
    "zh": "委员会星期二开会，决定在冬天到来之前修复河上的桥梁。",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("code", TEXTS)
def test_languages(code):
    document = Document(TEXTS[code], "0", metadata={"kind": "prose"})
    keep = LanguageFilter((code,))
    assert keep.filter(document) is True
    assert document.metadata["language"] == code and 0.65 <= document.metadata["language_score"] <= 1
    others = tuple(set(TEXTS) - {code})
    assert LanguageFilter(others).filter(document) == (False, f"language_{code}")


def test_capitals_are_the_same_language():
    assert LanguageFilter().identify(TEXTS["en"].upper())[0] == "en"


def test_unsure_and_empty():
    assert LanguageFilter(threshold=1.0).filter(Document(TEXTS["en"], "0")) in (True, (False, "language_unsure"))
    assert LanguageFilter().filter(Document("12 34 56 -- 78", "0"))[0] is False
    assert LanguageFilter().filter(Document("", "0"))[0] is False


def test_code_is_not_judged():
    assert LanguageFilter().filter(Document(TEXTS["de"], "0", metadata={"kind": "code"})) is True


def test_sample_reaches_from_the_beginning_to_the_end():
    text = "".join(f"{i} " for i in range(100_000))
    taken = sample(text)
    assert taken.startswith("0 1 2") and taken.endswith("99998 99999") and len(taken) < 3100
    assert sample("one\n two") == "one two"


def test_filter_is_copied_and_sent_to_other_processes_after_use():
    step = LanguageFilter()
    step.identify(TEXTS["en"])
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert other.identify(TEXTS["de"])[0] == "de"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"languages": "en"}, "give a list"),
        ({"threshold": 2}, "no probability"),
        ({"kinds": ("poem",)}, "'poem' is unknown"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        LanguageFilter(**arguments)
