"""Each quality rule drops what breaks it alone, at its bound, and real prose passes all."""

from __future__ import annotations

import pytest
from datatrove.data import Document
from prose import navigation, prose

from octavo.prepare.quality import QUALITY_RULES, QualityFilter, QualityRules, quality

RULES = QualityRules()
GOOD = "The people of the town have walked to the river with their boats and nets. " * 5


def test_running_text_passes():
    passed = [quality(text, RULES) is None for text in prose()]
    assert len(passed) > 100 and sum(passed) >= 0.97 * len(passed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "few_words"),
        (" ".join(GOOD.split()[:49]), "few_words"),
        (" ".join(GOOD.split()[:50]), None),
        ("of a to " * 30, "short_words"),
        ("incomprehensibilities with internationalization of " * 20, "long_words"),
        (GOOD + "# " * 9, "symbols"),
        (GOOD + "... " * 9, "symbols"),
        ("\n".join(f"- {GOOD}" for _ in range(10)), "bullets"),
        ("\n".join([f"- {GOOD}"] * 9 + [GOOD]), None),
        ("\n".join([GOOD + "…"] * 4 + [GOOD] * 6), "ellipses"),
        ("\n".join([GOOD + "…"] * 3 + [GOOD] * 7), None),
        (GOOD + "1234 " * 25, "few_letters"),
        ("Fresh apples, ripe pears, green plums, sweet cherries. " * 10, "few_stop_words"),
        (navigation(3), "few_stop_words"),
    ],
)
def test_rules(text, reason):
    assert quality(text, RULES) == reason


def test_bounds_can_be_set():
    assert quality(GOOD, QualityRules(max_words=len(GOOD.split()))) is None
    assert quality(GOOD, QualityRules(max_words=len(GOOD.split()) - 1)) == "many_words"


def test_filter_judges_by_kind():
    short = "word of the dictionary " * 6
    step = QualityFilter()
    assert step.filter(Document(short, "0", metadata={"kind": "prose"})) == (False, "few_words")
    assert step.filter(Document(short, "0")) == (False, "few_words")
    assert step.filter(Document(short, "0", metadata={"kind": "reference"})) is True
    assert step.filter(Document("x", "0", metadata={"kind": "code"})) is True
    assert QualityFilter({"code": RULES}).filter(Document("x", "0", metadata={"kind": "code"})) == (False, "few_words")
    assert QualityFilter({"code": RULES}).filter(Document("x", "0", metadata={"kind": "prose"})) is True


def test_statistics_and_survivors():
    step = QualityFilter(QUALITY_RULES)
    documents = [Document(text, str(i)) for i, text in enumerate([GOOD, "short", GOOD])]
    assert [document.id for document in step.run(iter(documents))] == ["0", "2"]
    assert step.stats["dropped_few_words"].total == 1


def test_rules_that_no_text_meets():
    with pytest.raises(ValueError, match="50 to 10 words"):
        QualityRules(max_words=10)
