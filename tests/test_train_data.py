"""The text of a run: plain or prepared, one tokenizer for all, held-out text by source, and a mixture that resumes bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluating import save_llama
from training import WORDS, assert_same_checkpoint, exact_records, small_config

from octavo.cli import main
from octavo.data import IndexedWriter, load_tokenizer, train_bpe
from octavo.data.corpus import write_manifest
from octavo.data.tokens import is_held_out
from octavo.evaluate.models import load_model
from octavo.hf.checkpoint import TOKENIZER_FILES
from octavo.train.data import Data
from octavo.train.metrics import read_metrics
from octavo.train.trainer import Trainer

CPU = torch.device("cpu")
SOURCES = {"web": (0.5, None), "code": (0.3, 3.0), "books": (0.2, 1.0)}


def write_corpus(folder: Path, tokenizer=None, sources=SOURCES, documents: int = 150) -> Path:
    """A prepared corpus of random documents, always the same; books are a tenth as many."""
    tokenizer = tokenizer or load_tokenizer("byte")
    entries = []
    for name, (weight, max_epochs) in sources.items():
        generator = random.Random(name)
        prefixes = {side: f"shards/{name}/{side}-00000" for side in ("train", "validation")}
        count = documents // 10 if name == "books" else documents
        texts = [" ".join(generator.choices(WORDS, k=generator.randint(5, 60))) for _ in range(count)]
        with (
            IndexedWriter(folder / prefixes["train"], "uint16", tokenizer) as train,
            IndexedWriter(folder / prefixes["validation"], "uint16", tokenizer) as validation,
        ):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                (validation if is_held_out(text, 0.2) else train).add(np.append(ids, tokenizer.eot))
        entries.append((name, weight, max_epochs, [prefixes["train"]], [prefixes["validation"]]))
    write_manifest(folder, tokenizer, entries)
    return folder


def mixed_config(folder: Path, *assignments: str):
    """A `small_config` on a prepared corpus."""
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus")
    own = [f"data.path={folder}/corpus", "data.val_fraction=0.01", "data.max_bytes=none"]
    return small_config(folder, *own, *assignments)


def make_data(config, **options) -> Data:
    return Data(config.data, config.seed, CPU, **options)


# --- prepared corpora


def test_a_prepared_folder_brings_its_tokenizer_and_weights(tmp_path: Path) -> None:
    bpe = train_bpe([" ".join(WORDS)] * 20, 300, tmp_path / "corpus" / "tokenizer.json")
    write_corpus(tmp_path / "corpus", bpe)
    data = make_data(mixed_config(tmp_path))
    assert data.vocab_size == 300 and data.tokenizer == tmp_path / "corpus" / "tokenizer.json"
    assert [source.weight for source in data._train.sources] == [0.5, 0.3, 0.2]
    assert [source.max_epochs for source in data._train.sources] == [None, 3.0, 1.0]
    inputs, targets = data.next_batch()
    assert inputs.shape == (2, 16) and set(bpe.decode(inputs.flatten().tolist())) <= set(" ".join(WORDS))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_tokenizers_that_contradict_are_refused_and_equal_ones_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    bpe = train_bpe([" ".join(WORDS)] * 20, 300, folder / "tokenizer.json")
    other = train_bpe(["quite another text " * 9], 290, tmp_path / "other.json")
    write_corpus(folder, bpe)
    for wanted, size in ((tmp_path / "other.json", other.vocab_size), ("byte", 257)):
        with pytest.raises(
            ValueError, match=rf"was prepared with tokenizer .*data.tokenizer asks for .* \({size} tokens\)"
        ):
            make_data(mixed_config(tmp_path, f"data.tokenizer={wanted}"))
    (tmp_path / "same.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text())))
    assert make_data(mixed_config(tmp_path, f"data.tokenizer={tmp_path}/same.json")).vocab_size == 300


def test_the_tokenizer_of_a_checkpoint_must_be_that_of_the_corpus(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, train_bpe([" ".join(WORDS)] * 20, 300, folder / "tokenizer.json"))
    for text, fits in ((" ".join(WORDS), True), ("of the same size, and other merges", False)):
        path = tmp_path / "checkpoint" / "tokenizer.json"
        size = train_bpe([text] * 20, 300, path).vocab_size
        source = SimpleNamespace(path=path.parent, tokenizer=path, config={"vocab_size": max(size, 300)})
        if fits:
            assert make_data(mixed_config(tmp_path), source=source).vocab_size == 300
        else:
            with pytest.raises(
                ValueError, match=r"was prepared with tokenizer .* and model.from asks for .*checkpoint"
            ):
                make_data(mixed_config(tmp_path), source=source)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_checkpoint_keeps_its_tokenizer_on_a_corpus_of_it(rewritten: bool, seed: int, tmp_path: Path) -> None:
    """Its special tokens and chat template too, though the corpus has a copy, or one written otherwise, without special tokens around
    a text: run and export are scored on the same ids."""
    llama = save_llama(tmp_path / "llama", seed)
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    copy = tmp_path / "corpus" / "tokenizer.json"
    copy.parent.mkdir()
    content = json.loads((llama / copy.name).read_text())
    copy.write_text(json.dumps(content | {"post_processor": None}) if rewritten else (llama / copy.name).read_text())
    write_corpus(copy.parent, load_tokenizer(copy))
    config = mixed_config(
        tmp_path,
        f"model.from={llama}",
        "model.dim=none",
        "model.n_layers=none",
        "train.steps=1",
        "model.break_even=none",
    )
    Trainer(config).run()
    assert main(["export", config.out, str(tmp_path / "export")]) == 0
    for file in TOKENIZER_FILES:
        assert (llama / file).exists() == (tmp_path / "export" / file).exists()
        assert not (llama / file).exists() or (llama / file).read_bytes() == (tmp_path / "export" / file).read_bytes()
    run, exported = (load_model(path, "bf16", device="cpu") for path in (config.out, tmp_path / "export"))
    ids = run.codec.encode("A dog.")
    assert ids[0] == run.codec.bos == 0 and ids == exported.codec.encode("A dog.") and run.codec.eos == 1


def test_settings_that_do_nothing_are_named_once(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, "data.val_fraction=0.2", "data.max_bytes=1000")
    with pytest.warns(
        UserWarning, match="data.val_fraction and data.max_bytes do nothing here: .* is a prepared corpus"
    ) as caught:
        make_data(config)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_data(mixed_config(tmp_path))


def test_held_out_text_by_source_and_in_the_mixture(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    data = make_data(config)
    assert data.held_out == ("web", "code", "books")
    for name in data.held_out:
        batches = list(data.validation(5, name))
        text = bytes(token for batch in batches for token in batch[0].flatten().tolist() if token < 256).decode()
        assert len(batches) == 5 and set(text.split()) & set(WORDS)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, data.validation(5, name), strict=True))
    own = [torch.cat([batch[0] for batch in data.validation(10**6, name)]) for name in data.held_out]
    mixed = torch.cat([batch[0] for batch in data.validation(50)])
    rows = [{tuple(row) for row in part.tolist()} for part in own]
    counts = [sum(tuple(row) in part for row in mixed.tolist()) for part in rows]
    assert len(mixed) == 100 and all(abs(c - w) <= 4 for c, w in zip(counts, (50, 30, 20), strict=True))
    with pytest.raises(ValueError, match="no source news has held-out text: there are web, code, books"):
        data.validation(5, "news")


def test_a_source_without_enough_held_out_text_is_left_out_of_validation(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    with IndexedWriter(folder / "shards/books/validation-00000", "uint16") as writer:
        writer.add([1, 2, 3, 256])
    entries = [
        (n, w, e, [f"shards/{n}/train-00000"], [f"shards/{n}/validation-00000"]) for n, (w, e) in SOURCES.items()
    ]
    write_manifest(folder, load_tokenizer("byte"), entries)
    with pytest.warns(UserWarning, match="validation goes without books: less than one sequence of 16 tokens"):
        data = make_data(mixed_config(tmp_path))
    assert data.held_out == ("web", "code")
    write_manifest(folder, load_tokenizer("byte"), [entries[2]])
    with pytest.raises(ValueError, match="no source of .* holds out the 17 tokens that data.seq_len=16 needs"):
        make_data(mixed_config(tmp_path))


def test_a_sequence_longer_than_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source .*holds .* tokens, fewer than the 100,001 that seq_len=100000 needs"):
        write_corpus(tmp_path / "corpus")
        with IndexedWriter(tmp_path / "corpus/shards/web/validation-00000", "uint16") as writer:
            writer.add([1] * 100_001)
        entries = [
            (n, w, e, [f"shards/{n}/train-00000"], ["shards/web/validation-00000"]) for n, (w, e) in SOURCES.items()
        ]
        write_manifest(tmp_path / "corpus", load_tokenizer("byte"), entries)
        make_data(mixed_config(tmp_path, "data.seq_len=100000"))


def test_more_steps_than_the_epochs_allow_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", sources={"web": (0.5, 1.0), "code": (0.5, 1.0)})
    with pytest.raises(
        ValueError, match=r"hold [\d,]+ sequences of 16 tokens within their max_epochs, and 400,000 are wanted"
    ):
        Trainer(mixed_config(tmp_path, "train.steps=100000"))
    assert not (tmp_path / "run").exists()


def test_what_is_left_is_counted_from_where_a_run_resumes(tmp_path: Path) -> None:
    """Not as if all steps had been as large as those to come."""
    sources = {"web": (0.5, 1.0), "code": (0.5, 1.0)}
    write_corpus(tmp_path / "corpus", sources=sources, documents=12)
    total = make_data(mixed_config(tmp_path))._train.total
    assert total is not None and total > 50
    # Micro-batches of two sequences: two steps before, one after.
    for before, after, fits in ((1, total // 6 + 2, True), (total // 5, total // 7, False)):
        Trainer(mixed_config(tmp_path, "train.steps=2", f"train.micro_batches={before}"), replace=True).run()
        longer = mixed_config(tmp_path, "train.steps=3", f"train.micro_batches={after}")
        if fits:
            assert Trainer(longer, resume=True).run().step == 3
        else:
            wanted = 2 * (2 * before + after)
            with pytest.raises(ValueError, match=f"hold {total} sequences.* and {wanted} are wanted"):
                Trainer(longer, resume=True)


def test_ranks_share_a_batch(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, "data.micro_batch=4")
    whole = make_data(config)
    ranks = [make_data(mixed_config(tmp_path), rank=rank, world=2) for rank in range(2)]
    for _ in range(20):
        assert torch.equal(torch.cat([rank.next_batch()[0] for rank in ranks]), whole.next_batch()[0])


def test_separate_documents_reach_the_model(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, "data.documents=separate", "data.seq_len=64", "data.micro_batch=16")
    data = make_data(config)
    inputs, targets, documents = data.next_batch()
    assert documents.shape == inputs.shape and (targets == -100).any()
    assert torch.equal(targets == -100, inputs == 256)  # the end of a document predicts nothing
    for path in (tmp_path / "corpus", tmp_path / "text.jsonl"):
        trainer = Trainer(
            mixed_config(tmp_path, "data.documents=separate", "train.steps=2", f"data.path={path}"), replace=True
        )
        assert trainer.run().val_loss is not None
    with pytest.raises(ValueError, match="data.documents=separate needs model.as=decoder"):
        mixed_config(tmp_path, "data.documents=separate", "model.as=transformers")


# --- resume


@pytest.mark.filterwarnings("ignore:source")
@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_a_mixture_resumes_bit_for_bit(tmp_path: Path, documents: str) -> None:
    """Over the end of a source, with accumulation: 24 steps are 9 and 15 more."""
    settings = [
        "recipe=bf16",
        "train.steps=24",
        "checkpoint.every=9",
        "checkpoint.keep=9",
        "train.eval_every=12",
        f"data.documents={documents}",
    ]
    settings += ["data.seq_len=64", "data.micro_batch=4"]
    whole = Trainer(mixed_config(tmp_path, *settings))
    assert len(whole.data._train._mixture.phases) == 3
    whole.run()
    assert whole.data._train.position > whole.data._train._mixture.phases[1].start > 9 * 8
    half = tmp_path / "half"
    shutil.copytree(whole.folder / "checkpoints" / "step-00000009", half / "checkpoints" / "step-00000009")
    Trainer(mixed_config(tmp_path, *settings, f"out={half}"), resume=True).run()
    assert_same_checkpoint(whole.folder / "checkpoints" / "step-00000024", half / "checkpoints" / "step-00000024")
    epochs = [record["epochs"] for record in read_metrics(whole.folder / "metrics.jsonl") if "epochs" in record]
    assert set(epochs[0]) == set(SOURCES) and epochs[-1]["books"] == 1.0 and epochs[-1]["web"] > epochs[0]["web"]
    assert exact_records(half) == [record for record in exact_records(whole.folder) if record["step"] > 9]


def test_another_corpus_or_mixture_is_refused_with_the_reason(tmp_path: Path) -> None:
    Trainer(mixed_config(tmp_path, "train.steps=2")).run()
    shutil.move(tmp_path / "corpus", tmp_path / "moved")
    moved = mixed_config(tmp_path, "train.steps=3", f"data.path={tmp_path}/moved")
    assert Trainer(moved, resume=True).step == 2  # the text is the same, wherever it lies
    manifest = json.loads((tmp_path / "moved" / "corpus.json").read_text())
    for field, value, message in (
        ("weight", 0.6, r"saved with web.weight=0.5 and now has 0.6"),
        ("max_epochs", 2.0, r"saved with web.max_epochs=None and now has 2.0"),
    ):
        changed = json.loads(json.dumps(manifest))
        changed["sources"][0][field] = value
        (tmp_path / "moved" / "corpus.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            Trainer(moved, resume=True)
    write_corpus(tmp_path / "moved", documents=140)
    with pytest.raises(ValueError, match=r"cannot be resumed: the text \(data.path"):
        Trainer(moved, resume=True)
