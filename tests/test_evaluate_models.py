"""Folders become models: runs of the trainer, Hugging Face checkpoints, and clear refusals of what is neither."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from evaluating import save_gpt2, save_llama, save_tokenizer
from training import newest, small_config

import octavo
from octavo.evaluate.models import find_model, load_model
from octavo.train.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run in O2."""
    config = small_config(tmp_path_factory.mktemp("run"), "recipe=O2", "train.steps=4")
    trainer = Trainer(config)
    trainer.run()
    return config, trainer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), seed=1)


def converted(model: torch.nn.Module) -> list[str]:
    return [layer.fqn for layer in octavo.convert_report(model) if layer.converted]


def test_a_run_is_loaded_as_it_was_trained(run):
    config, trainer = run
    tokens = torch.randint(0, 257, (2, 16))
    with torch.no_grad():
        expected = trainer.model.eval()(tokens)
    for path in (config.out, newest(config)):
        loaded = load_model(path, dtype="bf16", device="cpu")
        assert torch.equal(loaded.scorer.logits(tokens), expected)
        assert loaded.recipe == config.recipe and loaded.is_decoder and not loaded.model.training
        assert loaded.description["dtype"] == "bf16" and ".metadata" in loaded.description["files"]
        assert loaded.scorer.window == config.data.seq_len
    with pytest.warns(UserWarning, match="--bos and --no-bos do nothing"):
        load_model(config.out, device="cpu", add_bos=True)


def test_a_run_in_another_recipe_has_its_masters(run):
    config, trainer = run
    loaded = load_model(config.out, "bf16", device="cpu")
    assert converted(loaded.model) == [] and loaded.description["dtype"] == "fp32"
    masters = trainer.model.state_dict()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, masters[name])
    assert converted(load_model(config.out, "O1", device="cpu").model) == converted(trainer.model)


@pytest.mark.parametrize("through", ["transformers", "octavo"])
def test_a_hugging_face_folder(llama, through):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, 256, (3, 40))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)(tokens).logits
    loaded = load_model(llama, dtype="fp32", device="cpu", through=through)
    assert torch.allclose(loaded.scorer.logits(tokens), expected, atol=1e-4)
    assert loaded.is_decoder == (through == "octavo") == (loaded.description["through"] == "octavo")
    assert loaded.scorer.window == 64 and loaded.codec.bos == 0 and loaded.codec.eos == 1
    assert loaded.recipe.name == "bf16" and converted(loaded.model) == []


@pytest.mark.parametrize("through", ["transformers", "octavo"])
@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_fp8_rounds_products_and_no_more(llama, recipe, through):
    plain = load_model(llama, dtype="fp32", device="cpu", through=through)
    rounded = load_model(llama, recipe, dtype="fp32", device="cpu", through=through)
    layers = converted(rounded.model)
    assert len(layers) == (14 if through == "transformers" else 8) and not any("head" in name for name in layers)
    tokens = torch.randint(0, 256, (2, 30))
    gap = (plain.scorer.logits(tokens) - rounded.scorer.logits(tokens)).abs().mean()
    assert 0 < gap < 0.2 * plain.scorer.logits(tokens).abs().mean()


def test_gpt2_converts_its_conv1d(tmp_path):
    assert len(converted(load_model(save_gpt2(tmp_path, 1), "O1", device="cpu").model)) == 8


def test_windows_and_budgets(llama):
    loaded = load_model(llama, window=32, batch_tokens=77, device="cpu")
    assert (loaded.scorer.window, loaded.scorer.batch_tokens) == (32, 77)
    for window in (1, 65):
        with pytest.raises(ValueError, match=f"the window is {window}, and .* takes 2 to 64 tokens"):
            load_model(llama, window=window, device="cpu")
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        load_model(llama, batch_tokens=0, device="cpu")
    with pytest.raises(ValueError, match="dtype is 'fp8': use auto, bf16 or fp32"):
        load_model(llama, dtype="fp8", device="cpu")
    with pytest.raises(ValueError, match="through is 'vllm'"):
        load_model(llama, through="vllm", device="cpu")
    with pytest.raises(ValueError, match="no recipe is called 'O9'"):
        load_model(llama, "O9", device="cpu")


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(ValueError, match="nothing does not exist"):
        find_model(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: a model is a folder"):
        find_model(tmp_path / "file")
    with pytest.raises(ValueError, match="holds no model: found file; wanted checkpoints/ of octavo train"):
        find_model(tmp_path)


def test_a_tokenizer_of_another_vocabulary(llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    rows = len(save_tokenizer(folder, bos=True, extra=20)) - 20
    with pytest.raises(ValueError, match=f"has {rows + 20} tokens and the checkpoint an embedding of {rows}:"):
        load_model(folder, device="cpu")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer that transformers can read"):
        load_model(folder, device="cpu")


def test_tensors_that_are_missing_or_damaged(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "lack": {key: value for key, value in tensors.items() if key != name},
        "nan": {**tensors, name: torch.full_like(tensors[name], float("nan"))},
        "extra": {**tensors, "model.layers.7.mlp.up_proj.weight": tensors[name].clone()},
    }
    for case, changed in cases.items():
        folder = tmp_path / case
        shutil.copytree(llama, folder)
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="up_proj"):
            load_model(folder, device="cpu")
    folder = tmp_path / "cut"
    shutil.copytree(llama, folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_model(folder, device="cpu")


def test_a_damaged_run(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0].out, folder)
    (meta,) = folder.glob("checkpoints/*/meta.json")
    content = json.loads(meta.read_text())
    content["config"]["model"]["dim"] = 64
    meta.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="saved from another model"):
        load_model(folder, device="cpu")
    meta.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("kind", ["decoder", "transformers"])
def test_a_run_that_began_from_hugging_face(llama, tmp_path, kind):
    config = small_config(
        tmp_path, f"model.from={llama}", f"model.as={kind}", "model.dim=none", "model.n_layers=none", "train.steps=2"
    )
    trainer = Trainer(config)
    trainer.run()
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected = trainer.model.eval()(tokens)
    loaded = load_model(config.out, dtype="bf16", device="cpu")
    assert torch.equal(loaded.scorer.logits(tokens), expected)
    assert loaded.is_decoder == (kind == "decoder") and loaded.codec.eos == 1
    theirs = load_model(llama, device="cpu")
    assert loaded.scorer.window == theirs.scorer.window > config.data.seq_len
    assert loaded.codec.bos == theirs.codec.bos == 0
    for special in (None, True, False):
        assert loaded.codec.encode("A dog.", special) == theirs.codec.encode("A dog.", special)
    assert load_model(config.out, device="cpu", add_bos=False).codec.encode("A dog.")[0] != 0
    assert converted(load_model(config.out, "bf16", device="cpu").model) == []
