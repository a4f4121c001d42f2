"""Runs that begin from a checkpoint: continuing is loading and training, bit for bit; they resume and export without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import change_config, change_tensors, save, tensors_of
from training import assert_same_checkpoint, newest, small_settings, write_text

from octavo.cli import main
from octavo.convert import export as unconvert
from octavo.data.tokenizers import train_bpe
from octavo.hf import load_decoder
from octavo.hf.checkpoint import Checkpoint
from octavo.hf.tokenizer_files import write_tokenizer
from octavo.settings import override
from octavo.train.config import ModelConfig, TrainConfig
from octavo.train.presets import tiny
from octavo.train.restore import SavedRun
from octavo.train.setup import build_optimizer
from octavo.train.source import save_source
from octavo.train.trainer import Trainer

WAYS = ("decoder", "transformers")


def source(folder: Path, name: str = "llama", **changes: object) -> Path:
    """A checkpoint with the byte tokenizer, in BF16."""
    folder.mkdir(exist_ok=True)
    save(name, folder / "source", torch.bfloat16, **{"vocab_size": 257, **changes})
    write_tokenizer("byte", folder / "source")
    return folder / "source"


def run_config(folder: Path, checkpoint: Path, *assignments: str) -> TrainConfig:
    sets = [setting for setting in small_settings(folder) if not setting.startswith("model.")]
    return override(tiny(), [*sets, f"model.from={checkpoint}", "train.steps=4", "checkpoint.every=2", *assignments])


@pytest.mark.parametrize(("name", "way"), [("llama", "decoder"), ("gpt2", "decoder"), ("qwen2-tied", "transformers")])
def test_resumes_without_the_source_bit_for_bit(name: str, way: str, seed: int, tmp_path: Path) -> None:
    config = run_config(tmp_path, source(tmp_path, name), f"model.as={way}", "checkpoint.keep=3", f"seed={seed % 1000}")
    whole = Trainer(config).run()
    assert whole.val_loss is not None
    shutil.rmtree(tmp_path / "source")
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    half = override(config, [f"out={tmp_path}/half"])
    assert Trainer(half, resume=True).run().val_loss == whole.val_loss
    assert_same_checkpoint(newest(config), newest(half))
    with pytest.raises(ValueError, match=r"model.from = .*source.*model.from = .*other"):
        Trainer(override(half, [f"model.from={tmp_path}/other"]), resume=True)


def test_continuing_is_loading_and_training(seed: int, tmp_path: Path) -> None:
    """The same steps by hand, from `load_decoder`, give the same weights."""
    settings = ("train.micro_batches=1", "optim.warmup_steps=0", "optim.min_lr_ratio=1", "model.fused=false")
    config = run_config(tmp_path, source(tmp_path), *settings)
    trainer = Trainer(config)
    batches = [trainer.data.next_batch() for _ in range(4)]
    trainer.data.load_state_dict({**trainer.data.state_dict(), "position": 0})
    trainer.run()
    model = load_decoder(tmp_path / "source", recipe="O2", dtype=torch.bfloat16)
    optimizer = build_optimizer(config, model)
    from octavo.optim import clip_grad_norm_

    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr
        optimizer.step()
    trained = trainer.model.state_dict()
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())
    begun = load_decoder(tmp_path / "source", recipe="O2").state_dict()
    assert not torch.equal(begun["blocks.0.ffn.out.weight"], trained["blocks.0.ffn.out.weight"])


@pytest.mark.parametrize("way", WAYS)
def test_exported_runs_are_what_was_trained(way: str, seed: int, tmp_path: Path) -> None:
    """Through the command, in both formats, the source gone; transformers computes what the run's model does on those weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = run_config(tmp_path, source(tmp_path, "mistral"), f"model.as={way}")
    Trainer(config).run()
    shutil.rmtree(tmp_path / "source")
    trained = unconvert(SavedRun.open(config.out).load_model(dtype="fp32"))
    checkpoint = newest(config)
    assert main(["export", str(checkpoint), str(tmp_path / "bf16")]) == 0
    assert main(["export", config.out, str(tmp_path / "fp8"), "--format", "fp8"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    assert theirs.config.model_type == "mistral" and theirs.config.vocab_size == 257
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(parameter.bfloat16())
        tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "fp8")("leaf fold press").input_ids])
        torch.testing.assert_close(trained(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    assert tensors_of(tmp_path / "fp8")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert (tmp_path / "fp8" / "generation_config.json").is_file()
    again = run_config(tmp_path, tmp_path / "fp8", "train.steps=1", f"out={tmp_path}/again")
    assert Trainer(again).run().step == 1


def test_new_runs_are_exported_too(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer that they were trained with, although its file is gone."""
    documents = ["scale tensor step loss"] * 3
    tokenizer = train_bpe(documents, 270, tmp_path / "bpe.json")
    sets = [*small_settings(tmp_path), f"data.tokenizer={tmp_path}/bpe.json", "train.steps=2"]
    config = override(tiny(), sets)
    Trainer(config).run()
    (tmp_path / "bpe.json").unlink()
    run = SavedRun.open(config.out)
    assert run.source is None and run.load_model().config.vocab_size == tokenizer.vocab_size
    assert main(["export", config.out, str(tmp_path / "out")]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(documents[0]).input_ids
    assert ids == tokenizer.encode_batch(documents[:1])[0].tolist()
    assert theirs(torch.tensor([ids])).logits.isfinite().all()
    capsys.readouterr()
    assert main(["export", config.out, str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "not empty" in errors[0] and "no checkpoint" in errors[1]


def test_a_gguf_file_is_converted_into_the_cache(seed: int, tmp_path: Path) -> None:
    from test_hf_gguf import write_gguf

    write_gguf(tmp_path / "model.gguf")
    config = run_config(tmp_path, tmp_path / "model.gguf", "train.steps=1", "data.seq_len=8")
    assert Trainer(config).run().step == 1
    assert len(list((tmp_path / "cache").glob("gguf-*/model.safetensors"))) == 1


# --- what is refused, before anything is written


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["model.dim=32"], ["model.dim is 32", "has 64"]),
        (["model.n_kv_heads=4"], ["model.n_kv_heads is 4", "has 2"]),
        (["model.dialect=gpt"], ["model.dialect is gpt", "llama"]),
        (["model.tie_embeddings=true"], ["model.tie_embeddings is True"]),
        (["model.vocab_size=300"], ["model.vocab_size is 300", "257"]),
        (["data.seq_len=65"], ["data.seq_len is 65", "64"]),
        (["model.as=transformers", "model.dim=64"], ["model.dim is 64", "leave it out"]),
        (["model.as=transformers", "model.recompute=full"], ["model.recompute is full"]),
        (["model.as=transformers", "data.seq_len=65"], ["data.seq_len is 65", "64"]),
    ],
)
def test_settings_must_agree(assignments: list[str], words: list[str], tmp_path: Path) -> None:
    config = run_config(tmp_path, source(tmp_path), *assignments)
    with pytest.raises(ValueError) as error:
        Trainer(config)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_equal_settings_are_welcome(tmp_path: Path) -> None:
    equal = ["model.dim=64", "model.n_kv_heads=2", "model.ffn_dim=96", "model.dialect=llama", "model.vocab_size=257"]
    Trainer(run_config(tmp_path, source(tmp_path), *equal))


def test_the_vocabulary_must_be_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = source(tmp_path, vocab_size=320)
    write_text(tmp_path / "text.jsonl")
    train_bpe(["scale tensor"], 280, tmp_path / "other.json")
    other = f"data.tokenizer={tmp_path}/other.json"
    assert Trainer(run_config(tmp_path, checkpoint)).data.vocab_size == 257  # rows may be padded
    with pytest.raises(ValueError, match=r"other.json has .* tokens, and the tokenizer of .*source has 257"):
        Trainer(run_config(tmp_path, checkpoint, other))
    assert Trainer(run_config(tmp_path, checkpoint, "data.tokenizer=byte")).data.vocab_size == 257
    train_bpe(["scale tensor"], 257, tmp_path / "equal.json")
    with pytest.raises(ValueError, match=r"equal.json has 257 tokens, and the tokenizer of .*source has 257 others"):
        Trainer(run_config(tmp_path, checkpoint, f"data.tokenizer={tmp_path}/equal.json"))
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json: set data.tokenizer"):
        Trainer(run_config(tmp_path, checkpoint))
    Trainer(run_config(tmp_path, checkpoint, other))
    for rows in (1500, 200):
        change_config(checkpoint, vocab_size=rows)
        with pytest.raises(ValueError, match=f"embedding of .*source {rows:,} rows.*different vocabularies"):
            Trainer(run_config(tmp_path, checkpoint, "data.tokenizer=byte"))


@pytest.mark.parametrize("way", WAYS)
def test_bad_checkpoints_are_one_sentence_of_the_command(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = source(tmp_path)
    change_tensors(checkpoint, model__layers__1__mlp__up_proj__weight=None)
    sets = [s for s in small_settings(tmp_path) if not s.startswith("model.")] + [
        f"model.from={checkpoint}",
        f"model.as={way}",
    ]
    arguments = ["train", "tiny", *(word for setting in sets for word in ("--set", setting))]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("octavo: ") and "model.layers.1.mlp.up_proj.weight" in error
    assert not (tmp_path / "run").exists()


def test_from_is_first_and_clears_the_architecture() -> None:
    for order in (["model.from=x", "model.dim=64"], ["model.dim=64", "model.from=x"]):
        model = override(tiny(), order).model
        assert (
            model == ModelConfig.from_checkpoint("x", dim=64, break_even=None)
            and model.n_layers is None
            and model.dialect is None
        )
    with pytest.raises(ValueError, match="model.dim is none: a new model needs it"):
        override(tiny(), ["model.dim=none"])
    with pytest.raises(ValueError, match="checkpoint.*needs .*source.*copy it too|no checkpoint"):
        SavedRun.open("x")


def test_only_another_tokenizer_replaces_that_of_the_checkpoint(seed: int, tmp_path: Path) -> None:
    """By what it does, not by its path; bytes too, which have no file."""
    checkpoint = Checkpoint.open(source(tmp_path))
    (checkpoint.path / "chat_template.jinja").write_text("{{ messages }}")
    content = json.loads((checkpoint.path / "tokenizer.json").read_text())
    (tmp_path / "lower.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    (tmp_path / "copy.json").write_text(json.dumps(content))
    run = tmp_path / "run"
    run.mkdir()
    for tokenizer, kept in (("byte", True), (tmp_path / "copy.json", True), (tmp_path / "lower.json", False)):
        save_source(run / "source", checkpoint, tokenizer)
        assert (run / "source" / "chat_template.jinja").exists() == kept
        found = json.loads((run / "source" / "tokenizer.json").read_text())
        assert (found["normalizer"] is None) == kept
    for file in checkpoint.path.glob("*token*"):
        file.unlink()
    save_source(run / "source", checkpoint, "byte")  # one without a tokenizer
    assert json.loads((run / "source" / "tokenizer.json").read_text()) == content
    assert not (run / "source" / "chat_template.jinja").exists()


def test_what_an_unsaved_run_left_is_replaced(seed: int, tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint leaves its source behind, and the next one may begin from another."""
    config = run_config(tmp_path, source(tmp_path), "train.steps=1")
    Trainer(config).run()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    other = source(tmp_path / "other", "qwen2")
    Trainer(override(config, [f"model.from={other}"])).run()
    assert SavedRun.open(config.out).source.config["model_type"] == "qwen2"  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    Trainer(override(tiny(), [*small_settings(tmp_path), "train.steps=1"])).run()
    assert not (tmp_path / "run" / "source").exists()
