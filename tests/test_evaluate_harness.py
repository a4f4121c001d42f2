"""Our model in the harness answers every request as the harness's own `hf` model does with the same checkpoint.

With one row a batch the tensors that go into the model are the same, and so are the results, bit for bit. Other batches sum in another
order: log-probabilities then differ by 1e-4 at most, and greediness and generated text not at all.
"""

from __future__ import annotations

import random

import pytest
from evaluating import save_gpt2, save_llama, sentence, task_records, write_lines

from octavo.evaluate.models import load_model

pytest.importorskip("lm_eval")
WINDOW = 48


@pytest.fixture(scope="module", params=["llama", "llama without bos", "gpt2"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed of the model {seed}")
    if request.param == "gpt2":
        return save_gpt2(path, seed, WINDOW)
    return save_llama(path, seed, WINDOW, bos=request.param == "llama")


def hf(folder, batch_size: int, **options):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=batch_size, **options)


def ours(folder, batch_tokens: int, **options):
    from octavo.evaluate.harness import HarnessLM

    loaded = load_model(folder, dtype="fp32", device="cpu", batch_tokens=batch_tokens, **options)
    return HarnessLM(loaded, options.get("add_bos"))


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i, metadata=("task", i, 1))
        for i, args in enumerate(arguments)
    ]


def pairs(rng: random.Random, first: str, last: str) -> list[tuple[str, str]]:
    """Ordinary requests and every edge: no context, blanks at its end, one that is too long, one that spells a special token,
    answers of one token to a shared context, a continuation that almost fills the window, and the same request twice."""
    question = sentence(rng, 8)
    made = [(sentence(rng, rng.randrange(1, 12)), " " + sentence(rng, rng.randrange(1, 6))) for _ in range(12)]
    made += [("", "yes it was"), ("", " no"), (question + "  ", "yes"), (question + "\n", "no water")]
    made += [(sentence(rng, 150), " the old tree"), (first + question, " yes"), (question, " fire" + last)]
    made += [(question, answer) for answer in (" yes", " no", " the", " cat", " the cat")]
    made += [(question, " " + " ".join(["cat"] * (WINDOW - 4))), (question, " yes"), ("é 水 \u00a0", " ünï")]
    return made


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_loglikelihood_is_bitwise_with_one_row_a_batch(folder, seed, add_bos):
    rng = random.Random(seed)
    theirs = hf(folder, 1, **({} if add_bos is None else {"add_bos_token": add_bos}))
    asked = requests("loglikelihood", pairs(rng, theirs.tok_decode([theirs.prefix_token_id], False), "."))
    mine = ours(folder, 1, **({} if add_bos is None else {"add_bos": add_bos}))
    assert mine.loglikelihood(asked) == theirs.loglikelihood(asked, disable_tqdm=True)


def test_loglikelihood_in_batches(folder, seed):
    asked = requests("loglikelihood", pairs(random.Random(seed), "", "."))
    expected = hf(folder, 7).loglikelihood(asked, disable_tqdm=True)
    for found, (logprob, greedy) in zip(ours(folder, 300).loglikelihood(asked), expected, strict=True):
        assert found[0] == pytest.approx(logprob, abs=1e-4)
        assert found[1] == greedy


def test_rolling_is_bitwise_with_one_row_a_batch(folder, seed):
    rng = random.Random(seed)
    texts = [(sentence(rng, words),) for words in (1, 5, WINDOW, 2 * WINDOW, 5 * WINDOW + 3)]
    asked = requests("loglikelihood_rolling", texts)
    expected = hf(folder, 1).loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours(folder, 1).loglikelihood_rolling(asked) == expected
    for found, logprob in zip(ours(folder, 200).loglikelihood_rolling(asked), expected, strict=True):
        assert found == pytest.approx(logprob, abs=1e-4 * (1 + abs(logprob)))


def test_greedy_generation(folder, seed):
    rng = random.Random(seed)
    settings = [
        {"until": [" the", "\n"], "max_gen_toks": 12},
        {"until": "cat", "max_new_tokens": 9, "do_sample": False},
        {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0},
    ]
    asked = requests(
        "generate_until", [(sentence(rng, rng.choice((3, 5, 9, 60))), rng.choice(settings)) for _ in range(9)]
    )
    assert ours(folder, 150).generate_until(asked) == hf(folder, 3).generate_until(asked, disable_tqdm=True)
    assert ours(folder, 1).generate_until(asked) == hf(folder, 1).generate_until(asked, disable_tqdm=True)


def test_sampling_draws_what_transformers_draws(folder, seed):
    import torch

    settings = {"until": [" the"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7, "top_k": 20}
    asked = requests("generate_until", [("The cat runs", settings)])
    found = []
    for model in (ours(folder, 1), hf(folder, 1)):
        torch.manual_seed(seed)
        found.append(model.generate_until(asked))
    assert found[0] == found[1]


def test_our_decoder_gives_the_same_scores(folder, seed):
    asked = requests("loglikelihood", pairs(random.Random(seed), "", "."))
    expected = hf(folder, 4).loglikelihood(asked, disable_tqdm=True)
    for found, (logprob, greedy) in zip(
        ours(folder, 300, through="octavo").loglikelihood(asked), expected, strict=True
    ):
        assert found[0] == pytest.approx(logprob, abs=1e-4)
        assert found[1] == greedy
    generation = requests(
        "generate_until", [(sentence(random.Random(seed), 4), {"until": [" the"], "max_gen_toks": 10})]
    )
    assert ours(folder, 99, through="octavo").generate_until(generation) == hf(folder, 1).generate_until(generation)


def test_all_nine_tasks_score_equally_item_by_item(folder, seed, tmp_path):
    from lm_eval.evaluator import evaluate

    from octavo.evaluate.tasks import TASKS, harness_tasks, read_tasks

    for name, records in task_records(random.Random(seed), 4).items():
        write_lines(tmp_path / "data" / f"{name}.jsonl", records)
    local, missing = read_tasks(tmp_path / "data")
    assert [one.task.name for one in local] == list(TASKS) and not missing
    found = []
    for model in (ours(folder, 200, window=WINDOW), hf(folder, 5)):
        scratch = tmp_path / str(len(found))
        scratch.mkdir()
        tasks = harness_tasks(local, scratch)
        for task in tasks["tasks"].values():
            task.set_config(key="num_fewshot", value=0)
        found.append(evaluate(model, tasks, bootstrap_iters=0))
    for name in TASKS:
        mine, theirs = (run["samples"][name] for run in found)
        assert len(mine) == len(theirs) == 4
        for a, b in zip(mine, theirs, strict=True):
            assert (
                a["prompt_hash"] == b["prompt_hash"] and a["acc"] == b["acc"] and a.get("acc_norm") == b.get("acc_norm")
            )
            for x, y in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                assert x[0] == pytest.approx(y[0], abs=1e-4) and x[1] == y[1]


def test_a_continuation_longer_than_the_window_is_scored_in_rolling_windows(folder, seed):
    text = " " + sentence(random.Random(seed), 3 * WINDOW)
    model = ours(folder, 200)
    score, greedy = model.loglikelihood(requests("loglikelihood", [("", text)]))[0]
    tokens = model.tok_encode(text, add_special_tokens=False)
    rolling = model._loglikelihood_tokens([(None, *window) for window in model._windows(tokens, model.prefix_token_id)])
    assert score == pytest.approx(sum(part for part, _ in rolling), rel=1e-6) and not greedy


def test_what_cannot_be_scored_is_said(folder):
    model = ours(folder, 64)
    with pytest.raises(ValueError, match="empty continuation"):
        model.loglikelihood(requests("loglikelihood", [("The cat", "")]))
    with pytest.raises(ValueError, match="100 generated tokens, and the window holds 48"):
        model.generate_until(requests("generate_until", [("The cat", {"max_gen_toks": 100})]))
