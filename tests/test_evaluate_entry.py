"""`octavo eval` from end to end: one sentence for what a user gets wrong, and results that compare without the models."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluating import save_llama, sentence, task_records, write_lines
from training import small_config

from octavo.cli import main
from octavo.data import load_tokenizer
from octavo.data.corpus import write_manifest
from octavo.data.indexed import IndexedWriter
from octavo.evaluate import EvalConfig, Results, evaluate
from octavo.train.trainer import Trainer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, a LLaMA, six tasks and a text."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # as `octavo eval` does where transformers is not yet imported
    folder = tmp_path_factory.mktemp("evaluation")
    Trainer(small_config(folder, "recipe=O2", "train.steps=3", "data.seq_len=256")).run()
    save_llama(folder / "llama", seed=3, window=128)
    for name, records in task_records(random.Random(5), 6).items():
        if name not in ("copa", "winogrande"):
            write_lines(folder / "tasks" / f"{name}.jsonl", records)
    rng = random.Random(6)
    (folder / "text.txt").write_text(" ".join(sentence(rng, 20) for _ in range(30)))
    return folder


def test_fp8_beside_bf16(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    command = "eval llama --tasks tasks --text text.txt --recipe bf16,O2 --device cpu --stride 64 --out out"
    assert main(command.split()) == 0
    printed = capsys.readouterr()
    assert "missing: copa (no copa.jsonl)" in printed.out and "llama-O2 minus llama-fp32" in printed.out
    assert "it/s" not in printed.err
    names = {path.name for path in (place / "out").iterdir()}
    assert names == {
        *(f"llama-{kind}{end}" for kind in ("fp32", "O2") for end in (".json", ".items.jsonl")),
        "llama-fp32-vs-llama-O2.json",
        "llama-fp32-vs-llama-O2.png",
    }
    plain, rounded = (Results.read(place / "out" / f"llama-{kind}.json") for kind in ("fp32", "O2"))
    assert rounded.recipe["name"] == "O2" and rounded.recipe["input"] == "E4M3"
    assert plain.versions["lm_eval"] and set(plain.missing) == {"copa", "winogrande"}
    assert len(plain.model["files"]["model.safetensors"]) == 64
    for measurement in plain.measurements:
        assert measurement.data["checksum"] and measurement.data["items"] == len(measurement.items)
        if measurement.kind == "task":
            acc = [item["acc"] for item in measurement.items]
            assert measurement.metrics["acc"] == pytest.approx(np.mean(acc))
            assert measurement.metrics["acc_stderr"] == pytest.approx(np.std(acc, ddof=1) / np.sqrt(len(acc)))
    assert plain.find("lambada_openai").metrics["perplexity"] > 1
    assert plain.find("text").metrics["loss"] != rounded.find("text").metrics["loss"]

    # The two JSON files are enough, whatever becomes of the models.
    before = json.loads((place / "out" / "llama-fp32-vs-llama-O2.json").read_text())
    (place / "elsewhere").mkdir()
    for path in (place / "out").glob("llama-??*.json*"):
        path.rename(place / "elsewhere" / path.name)
    (place / "llama").rename(place / "gone")
    try:
        assert main("eval --compare elsewhere/llama-fp32.json elsewhere/llama-O2.json --out again".split()) == 0
    finally:
        (place / "gone").rename(place / "llama")
    assert json.loads((place / "again" / "llama-fp32-vs-llama-O2.json").read_text()) == before
    assert (place / "again" / "llama-fp32-vs-llama-O2.png").is_file()


def test_a_run_and_a_corpus_by_source(place, seed, tmp_path, monkeypatch):
    """The loss of a source is that of the trainer's own model on its windows."""
    rng = np.random.default_rng(seed)
    byte = load_tokenizer("byte")
    shards = {}
    for source in ("prose", "code"):
        for side in ("train", "validation"):
            prefix = f"shards/{source}/{side}-00000"
            (tmp_path / prefix).parent.mkdir(parents=True, exist_ok=True)
            with IndexedWriter(tmp_path / prefix, "uint16") as writer:
                for _ in range(4):
                    writer.add(np.append(rng.integers(32, 127, 300), byte.eot))
            shards[source, side] = prefix
    write_manifest(
        tmp_path, byte, [(s, 1.0, None, [shards[s, "train"]], [shards[s, "validation"]]) for s in ("prose", "code")]
    )
    config = EvalConfig([str(place / "run")], corpus=str(tmp_path), device="cpu", out=str(tmp_path / "out"))
    (results,) = evaluate(config)
    assert [m.name for m in results.measurements] == ["corpus/prose", "corpus/code"] and results.label == "run-O2"
    model = Trainer(small_config(place, "recipe=O2", "train.steps=3", "data.seq_len=256"), resume=True).model.eval()
    for source in ("prose", "code"):
        shard = np.fromfile(tmp_path / f"{shards[source, 'validation']}.bin", np.uint16).astype(np.int64)
        losses = []
        for begin in range(0, len(shard) - 256, 256):
            tokens = torch.from_numpy(shard[begin : begin + 257])[None]
            with torch.no_grad():
                losses.append(float(model.float()(tokens[:, :-1], tokens[:, 1:])))
        measured = results.find(f"corpus/{source}")
        assert measured.data["items"] == len(losses) == 4 and measured.data["tokens"] == 4 * 256
        assert measured.metrics["loss"] == pytest.approx(np.mean(losses), rel=0.01)
    again = replace(config, corpus=None, text=str(place / "text.txt"), limit=1)
    assert [one.label for one in evaluate(again) + evaluate(again)] == ["run-O2-2", "run-O2-2"]
    assert Results.read(tmp_path / "out" / "run-O2.json").measurements == results.measurements
    monkeypatch.setattr(
        "octavo.evaluate.entry.measure_text", lambda *_, **__: pytest.fail("measured before all is checked")
    )
    with pytest.raises(ValueError, match="was prepared with tokenizer byte .257 tokens., and .* has another"):
        evaluate(
            EvalConfig(
                [str(place / "llama")],
                corpus=str(tmp_path),
                text=str(place / "text.txt"),
                device="cpu",
                out=str(tmp_path / "out"),
            )
        )


def test_a_source_that_holds_out_too_little_is_left_out(place, seed, tmp_path, capsys):
    """Of three sources one has no held-out token and one fewer than a window: the third is measured, both are told of."""
    rng = np.random.default_rng(seed)
    byte = load_tokenizer("byte")
    sizes = {"wiki": 0, "books": 12, "code": 90}

    def write(names):
        sources = []
        for name in names:
            shards = {}
            for side, size in (("train", 300), ("validation", sizes[name])):
                shards[side] = f"shards/{name}/{side}-00000"
                (tmp_path / shards[side]).parent.mkdir(parents=True, exist_ok=True)
                with IndexedWriter(tmp_path / shards[side], "uint16") as writer:
                    if size:
                        writer.add(rng.integers(32, 127, size))
            sources.append((name, 1.0, None, [shards["train"]], [shards["validation"]]))
        write_manifest(tmp_path, byte, sources)

    write(sizes)
    out = tmp_path / "out"
    config = EvalConfig([str(place / "run")], corpus=str(tmp_path), device="cpu", window=16, out=str(out))
    with pytest.warns(UserWarning, match="not every source .* is measured. wiki: holds out 0 tokens") as warned:
        (results,) = evaluate(config)
    assert len([one for one in warned if "not every source" in str(one.message)]) == 1
    assert [m.name for m in results.measurements] == ["corpus/code"]
    assert list(results.missing) == ["corpus/wiki", "corpus/books"]
    assert "--window" not in results.missing["corpus/wiki"]  # no window is small enough
    assert "larger share for validation" in results.missing["corpus/wiki"]
    assert results.missing["corpus/books"].endswith("or use --window 11")
    assert Results.read(out / "run-O2.json").missing == results.missing
    assert "missing: corpus/wiki (holds out 0 tokens" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="wiki: holds out 0 tokens"):
        (longer,) = evaluate(replace(config, window=11))
    assert [m.name for m in longer.measurements] == ["corpus/books", "corpus/code"]
    write(["wiki"])
    with pytest.raises(ValueError, match="no source of .* can be measured. wiki: holds out 0 .*share for validation$"):
        evaluate(config)


@pytest.mark.parametrize(
    "command, message",
    [
        ("eval", "no model is given"),
        ("eval llama", "nothing to evaluate is given"),
        ("eval nowhere --text text.txt", "nowhere does not exist"),
        ("eval tasks --text text.txt", "tasks holds no model"),
        ("eval llama --tasks tasks --only piqa,hellaswga", "no task is called 'hellaswga'; did you mean hellaswag"),
        ("eval llama --tasks nowhere", "nowhere is no folder"),
        ("eval llama --tasks tasks --only copa", "tasks has no file of a task: looked for copa.jsonl"),
        ("eval llama --tasks tasks --limit 0", "limit is 0: it must be positive"),
        ("eval llama --text text.txt --recipe O7", "no recipe is called 'O7'"),
        ("eval llama --text nothing.txt", "nothing.txt does not exist"),
        ("eval llama --text text.txt --only piqa", "--only chooses among the tasks of --tasks"),
        ("eval llama --text text.txt --stride 129 --device cpu", "the stride is 129"),
        ("eval llama --text text.txt --window 500 --device cpu", "the window is 500"),
        ("eval llama --corpus tasks", "corpus.json cannot be read"),
        ("eval llama --text text.txt --device tpu", "device=tpu cannot be used here"),
        ("eval --compare only-one.json", "--compare takes two or more"),
        ("eval --compare a.json b.json", "a.json cannot be read"),
    ],
)
def test_one_sentence_for_what_cannot_be(place, capsys, monkeypatch, command, message):
    monkeypatch.chdir(place)
    before = set(place.rglob("*"))
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("octavo: ") and "Traceback" not in error
    assert {path for path in set(place.rglob("*")) - before if path.parent.name != "cache"} == set()


def test_equal_names_get_numbers(place, tmp_path):
    text = str(place / "text.txt")
    models = [str(place / "run"), str(place / "run")]
    results = evaluate(EvalConfig(models, text=text, limit=2, device="cpu", out=str(tmp_path)))
    assert [one.label for one in results] == ["run-O2", "run-O2-2"]
    assert results[0].measurements == results[1].measurements


def test_the_hub_is_asked_only_on_request_and_said_when_away(place, monkeypatch, tmp_path):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the data sets of the hub cannot be had here .*give a folder of JSON lines"):
        evaluate(EvalConfig([str(place / "llama")], tasks="hub", only=["piqa"], device="cpu", out=str(tmp_path)))
