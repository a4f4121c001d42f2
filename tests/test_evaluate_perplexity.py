"""Scores and perplexities equal a direct computation, token by token, from the logits of the model.

The direct computation runs the model on exactly the tokens that a prediction may see; nothing of it is shared with the package.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from evaluating import sentence

from octavo.data import load_tokenizer
from octavo.data.long_texts import PIECE_CHARACTERS
from octavo.evaluate.codec import OctavoCodec
from octavo.evaluate.generation import Sampling, generate
from octavo.evaluate.models import LoadedModel
from octavo.evaluate.perplexity import _encode, text_loss, token_loss, windows
from octavo.evaluate.scoring import Scorer
from octavo.formats import NumericsError
from octavo.models import Transformer, TransformerConfig
from octavo.recipe import RECIPES

WINDOW = 24


@pytest.fixture
def loaded(seed) -> LoadedModel:
    """A random byte-level decoder whose predictions are far from uniform."""
    config = TransformerConfig("llama", 64, 2, 4, 2, vocab_size=257, max_seq_len=WINDOW, dtype=torch.float32)
    model = Transformer.build(config, seed=seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    scorer = Scorer(model, WINDOW, 100, torch.device("cpu"))
    return LoadedModel(model, OctavoCodec(load_tokenizer("byte")), scorer, RECIPES["bf16"], {})


def logprob(loaded: LoadedModel, seen: list[int], token: int) -> float:
    """log p(token | seen), for 1 to `WINDOW` tokens."""
    with torch.no_grad():
        logits = loaded.model(torch.tensor([seen]))[0, -1].double()
    return float(logits.log_softmax(-1)[token])


def test_scores_token_by_token(loaded, seed):
    rng = random.Random(seed)
    pairs = [
        (
            [rng.randrange(256) for _ in range(rng.randrange(1, 40))],
            [rng.randrange(256) for _ in range(rng.randrange(1, 9))],
        )
        for _ in range(12)
    ]
    shared = [rng.randrange(256) for _ in range(9)]
    pairs += [(shared, [1]), (shared, [2]), (shared[:-1], [shared[-1], 3]), (shared, [1])]
    done = []
    scores = loaded.scorer.score(pairs, done.append)
    assert sum(done) == len(pairs) and len(done) > 1
    for (context, continuation), score in zip(pairs, scores, strict=True):
        tokens, total, greedy = context + continuation, 0.0, True
        first = max(0, len(tokens) - WINDOW - 1)
        for place in range(len(context), len(tokens)):
            seen = tokens[first:place]
            total += logprob(loaded, seen, tokens[place])
            greedy &= int(loaded.model(torch.tensor([seen]))[0, -1].argmax()) == tokens[place]
        assert score.logprob == pytest.approx(total, abs=1e-4) and score.greedy == greedy


def test_a_greedy_continuation_is_called_greedy(loaded, seed):
    context = [random.Random(seed).randrange(256) for _ in range(5)]
    following = loaded.model.generate(torch.tensor([context]), 4, temperature=0)[0, 5:].tolist()
    other = [*following[:-1], (following[-1] + 1) % 256]
    scores = loaded.scorer.score([(context, following), (context, other)])
    assert [score.greedy for score in scores] == [True, False]


def test_scores_do_not_depend_on_the_batch(loaded, seed):
    rng = random.Random(seed)
    pairs = [([rng.randrange(256)] * rng.randrange(1, 20), [rng.randrange(256)]) for _ in range(30)]
    model, device = loaded.model, torch.device("cpu")
    runs = [Scorer(model, WINDOW, budget, device).score(pairs) for budget in (1, 57, 100_000)]
    for other in runs[1:]:
        assert [s.logprob for s in other] == pytest.approx([s.logprob for s in runs[0]], abs=1e-4)


def test_what_cannot_be_scored(loaded):
    for pair in (([], [1]), ([1], []), ([1], [1] * (WINDOW + 1))):
        with pytest.raises(ValueError, match="request 1 has"):
            loaded.scorer.score([([1], [2]), pair])
    assert loaded.scorer.score([]) == []
    with torch.no_grad():
        loaded.model.norm.weight[3] = math.nan
    with pytest.raises(NumericsError, match="1 of 1 continuations the log-probability nan"):
        loaded.scorer.score([([1], [2])])


@pytest.mark.parametrize("stride", [None, 1, 7, WINDOW])
def test_text_loss_is_the_sum_over_its_tokens(loaded, seed, stride):
    rng = random.Random(seed)
    documents = [sentence(rng, words) for words in (12, 1, 3)] + ["é" * 11]
    found = text_loss(loaded, documents, stride=stride)
    step = stride or WINDOW
    total = 0.0
    for text in documents:
        tokens = list(text.encode())
        for place, token in enumerate(tokens):
            # The window that predicts it ends `step` tokens after the last one that the window before predicts.
            end = WINDOW if place < WINDOW else WINDOW + -(-(place + 1 - WINDOW) // step) * step
            end = min(end, len(tokens))
            first = end - WINDOW - 1
            seen = [256, *tokens[:place]] if end <= WINDOW else tokens[first:place]
            total -= logprob(loaded, seen, token)
    size = sum(len(text.encode()) for text in documents)
    words = sum(len(text.split()) for text in documents)
    assert (found.documents, found.tokens, found.words, found.bytes) == (4, size, words, size)
    assert found.nll == pytest.approx(total, rel=1e-6)
    assert found.metrics == pytest.approx(
        {
            "loss": total / size,
            "token_perplexity": math.exp(total / size),
            "word_perplexity": math.exp(total / words) if total / words < 700 else math.inf,
            "bits_per_byte": total / size / math.log(2),
        },
        rel=1e-5,
    )


def test_windows_predict_each_token_once(seed):
    rng = random.Random(seed)
    for _ in range(200):
        count, window = rng.randrange(0, 90), rng.randrange(1, 30)
        spans = list(windows(count, window, rng.randrange(1, window + 1)))
        assert [place for first, last in spans for place in range(first, last)] == list(range(count))


def test_a_limit_cuts_after_so_many_windows(loaded, seed):
    text = sentence(random.Random(seed), 60)
    full, cut = text_loss(loaded, [text, text]), text_loss(loaded, [text, text], limit=2)
    assert np.array(cut.windows) == pytest.approx(np.array(full.windows[:2])) and cut.tokens == 2 * WINDOW
    assert cut.bytes == 2 * WINDOW


def test_a_limit_bounds_what_is_tokenized(loaded, seed, monkeypatch):
    """Of a long text one piece; the whole of it in pieces gives its own ids, words and bytes."""
    rng = random.Random(seed)
    text = " ".join(sentence(rng, rng.randrange(3, 9)) + rng.choice(["", "\n", " café"]) for _ in range(50_000))
    assert len(text) > PIECE_CHARACTERS
    ids, words, size = _encode(loaded.codec, text, None)
    assert ids.tolist() == loaded.codec.encode(text, special=False)
    assert (words, size) == (len(text.split()), len(text.encode()))
    endless = "é" * (PIECE_CHARACTERS + 5)
    assert _encode(loaded.codec, endless, None)[1:] == (1, 2 * len(endless))
    taken = []
    encode = type(loaded.codec).encode
    monkeypatch.setattr(
        type(loaded.codec), "encode", lambda self, part, special=None: taken.append(part) or encode(self, part, special)
    )
    cut = text_loss(loaded, [text, text], limit=3, stride=WINDOW // 2)
    assert len(cut.windows) == 3 and cut.tokens == 2 * WINDOW and len(taken) == 1
    short = text_loss(loaded, [text[: len(taken[0])]], limit=3, stride=WINDOW // 2)
    assert cut == short


def test_bad_strides_and_empty_texts(loaded):
    for stride in (0, WINDOW + 1):
        with pytest.raises(ValueError, match=f"the stride is {stride}"):
            text_loss(loaded, ["text"], stride=stride)
    with pytest.raises(ValueError, match="no token"):
        text_loss(loaded, [""])


def test_token_loss_is_the_models_own_loss(loaded, seed):
    tokens = np.random.default_rng(seed).integers(0, 257, 5 * WINDOW + 4).astype(np.uint16)
    losses = token_loss(loaded.scorer, tokens)
    assert len(losses) == 5
    ids = torch.from_numpy(tokens[: 5 * WINDOW + 1].astype(np.int64))
    with torch.no_grad():
        expected = loaded.model(ids[:-1].view(5, WINDOW), ids[1:].view(5, WINDOW))
    assert sum(loss for loss, _ in losses) / sum(count for _, count in losses) == pytest.approx(
        float(expected), rel=1e-5
    )
    assert np.array(token_loss(loaded.scorer, tokens, limit=2)) == pytest.approx(np.array(losses[:2]))
    with pytest.raises(ValueError, match="fewer than the 25 of one window"):
        token_loss(loaded.scorer, tokens[:WINDOW])


def test_own_generation(loaded, seed):
    rng = random.Random(seed)
    contexts = [[rng.randrange(256) for _ in range(n)] for n in (3, 9, 3, 5)]
    greedy = Sampling.of({"until": [], "max_gen_toks": 6}, 256, "")
    texts = dict(generate(loaded, contexts, greedy))
    for number, context in enumerate(contexts):
        new = loaded.model.generate(torch.tensor([context]), 6, temperature=0)[0, len(context) :].tolist()
        new = new[: new.index(256)] if 256 in new else new
        assert texts[number] == loaded.codec.decode(new)
    stop = texts[1][2:3]
    if stop:
        cut = Sampling.of({"until": stop, "max_gen_toks": 6}, 256, "")
        assert dict(generate(loaded, contexts, cut))[1] == texts[1].split(stop)[0]
    torch.manual_seed(seed)
    one = Sampling.of({"do_sample": True, "top_k": 1, "max_tokens": 6}, 256, "")
    assert dict(generate(loaded, contexts, one)) == texts  # the draw of one
    tiny = Sampling.of({"temperature": 0.8, "top_p": 1e-9, "max_tokens": 6}, 256, "")
    assert dict(generate(loaded, contexts, tiny)) == texts
    with pytest.raises(ValueError, match="generation with num_beams is not there"):
        list(generate(loaded, contexts, Sampling.of({"num_beams": 2}, 256, "")))


def test_sampling_reads_the_settings_of_tasks():
    assert Sampling.of({}, 256, "<eos>") == Sampling(256, ("<eos>",), 0.0)
    assert Sampling.of({"until": "a", "max_tokens": 3, "temperature": 0.5}, 256, "e") == Sampling(3, ("a", "e"), 0.5)
    assert (
        Sampling.of({"do_sample": False, "temperature": 0.5, "max_gen_toks": 4, "max_tokens": 3}, 256, "").temperature
        == 0
    )
    assert Sampling.of({"do_sample": True, "top_p": 0.9}, 256, "") == Sampling(256, (), 1.0, (("top_p", 0.9),))
    for settings in ({"max_gen_toks": 0}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match="both must be positive"):
            Sampling.of(settings, 256, "")
