"""Checkpoints of all families on our decoder: the logits of transformers, in the memory of the model; bad ones refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, VOCAB, change_config, change_tensors, save

from octavo.convert import convert
from octavo.convert import export as unconvert
from octavo.hf import load_decoder, load_transformers
from octavo.tensor import ScaledTensor


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_loss_are_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    ours, itself = load_decoder(tmp_path), load_transformers(tmp_path)
    tokens = torch.randint(VOCAB, (2, 50))
    with torch.no_grad():
        expected = theirs(tokens)
        logits = expected.logits
        assert logits.std() > 0.5  # or equal logits would say nothing
        torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(itself(tokens), logits, rtol=0, atol=1e-6)
        loss = theirs(tokens, labels=tokens).loss
        for model in (ours, itself):
            torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-biased", "gpt2", "qwen2"])
def test_parameters_and_flops_are_counted_alike(name: str, seed: int, tmp_path: Path) -> None:
    save(name, tmp_path)
    ours, itself = load_decoder(tmp_path), load_transformers(tmp_path)
    for model in (ours, itself):
        assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    padding = 6 * (ours.config.padded_vocab_size - VOCAB) * 64
    wider_heads = 6 * 2 * 50 * (ours.config.attention_width - 64)  # that the config of transformers does not tell
    assert ours.flops_per_token(50) - padding - wider_heads == itself.flops_per_token(50)


def test_gradients_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    theirs = save("llama-biased", tmp_path)
    ours = load_decoder(tmp_path)
    tokens = torch.randint(VOCAB, (2, 40))
    theirs(tokens, labels=tokens).loss.backward()
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    layer, block = theirs.model.layers[1], ours.blocks[1]
    qkv = [getattr(layer.self_attn, f"{part}_proj").weight.grad for part in "qkv"]
    torch.testing.assert_close(block.attention.qkv.weight.grad, torch.cat(qkv), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(block.ffn.out.bias.grad, layer.mlp.down_proj.bias.grad, rtol=1e-3, atol=1e-6)
    embedding = ours.embedding.weight.grad
    torch.testing.assert_close(embedding[:VOCAB], theirs.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-6)
    assert not ours.lm_head.weight.grad[VOCAB:].any() and ours.lm_head.weight.grad[:VOCAB].any()


def test_shards_bare_models_and_half_precision(seed: int, tmp_path: Path) -> None:
    """In shards; in BF16, exactly; and a GPT-2 of the bare model, whose names lack the prefix and which holds its masks."""
    theirs = save("llama", tmp_path / "a", torch.bfloat16, shards="60KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    block = load_decoder(tmp_path / "a").blocks[0]
    assert torch.equal(block.ffn.out.weight, theirs.model.layers[0].mlp.down_proj.weight.float())
    theirs = save("gpt2", tmp_path / "b")
    theirs.transformer.save_pretrained(tmp_path / "b")
    change_tensors(tmp_path / "b", h__0__attn__bias=torch.ones(1, 1, 64, 64).tril())
    tokens = torch.randint(VOCAB, (1, 20))
    torch.testing.assert_close(load_decoder(tmp_path / "b")(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_blocks_are_converted_as_they_are_read(recipe: str, seed: int, tmp_path: Path) -> None:
    """Loading with a recipe is loading, then converting: bit for bit."""
    save("qwen2", tmp_path, torch.bfloat16)
    at_once, after = load_decoder(tmp_path, recipe=recipe), convert(load_decoder(tmp_path), recipe)
    weight = at_once.blocks[0].attention.qkv.weight
    assert isinstance(weight, ScaledTensor) == (recipe == "O2")
    for name, value in at_once.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    tokens = torch.randint(VOCAB, (2, 16))
    assert torch.equal(at_once(tokens), after(tokens))
    unconvert(at_once)  # an FP16 master holds BF16 weights of a usual spread exactly
    plain = load_decoder(tmp_path)
    torch.testing.assert_close(at_once.blocks[1].ffn.out.weight, plain.blocks[1].ffn.out.weight, rtol=2**-10, atol=1e-6)


# --- what is refused


def _nan(shape: tuple[int, ...]) -> torch.Tensor:
    value = torch.randn(shape)
    value[-1, -1] = float("nan")
    return value


NORM, DOWN, Q = (
    "model__norm__weight",
    "model__layers__1__mlp__down_proj__weight",
    "model__layers__0__self_attn__q_proj__weight",
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({DOWN: None}, ["lacks the tensor", "model.layers.1.mlp.down_proj.weight"]),
        ({DOWN: None, Q: None}, ["lacks the tensor", "(and 1 more)"]),
        ({"model__extra__weight": torch.ones(3)}, ["model.extra.weight", "transformers"]),
        ({DOWN: torch.randn(64, 95)}, ["model.layers.1.mlp.down_proj.weight", "(64, 95)", "(64, 96)"]),
        ({DOWN: torch.randn(96, 64)}, ["model.layers.1.mlp.down_proj.weight", "(96, 64)"]),
        ({Q: torch.zeros(64, 64)}, ["model.layers.0.self_attn.q_proj.weight", "all zeros"]),
        ({DOWN: _nan((64, 96))}, ["model.layers.1.mlp.down_proj.weight", "infinity or NaN"]),
        ({NORM: torch.zeros(64)}, ["model.norm.weight", "all zeros"]),
        ({NORM: torch.full((64,), float("inf"))}, ["model.norm.weight", "infinity or NaN"]),
        ({Q: torch.randint(-9, 9, (64, 64), dtype=torch.int8)}, ["model.layers.0.self_attn.q_proj.weight", "I8"]),
        ({Q: torch.randn(64, 64).to(torch.float8_e4m3fn)}, ["model.layers.0.self_attn.q_proj.weight", "_scale"]),
    ],
)
def test_tensors_are_named(changes: dict, words: list[str], tmp_path: Path) -> None:
    save("llama", tmp_path)
    change_tensors(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        load_decoder(tmp_path)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in [str(tmp_path), *words])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({DOWN: None}, ["model.layers.1.mlp.down_proj.weight"]),
        ({"model__extra__weight": torch.ones(3)}, ["model.extra.weight"]),
        ({DOWN: torch.randn(64, 95)}, ["another shape", "model.layers.1.mlp.down_proj.weight"]),
        ({Q: torch.zeros(64, 64)}, ["model.layers.0.self_attn.q_proj.weight", "all zeros"]),
        ({DOWN: _nan((64, 96))}, ["model.layers.1.mlp.down_proj.weight", "infinity or NaN"]),
        ({NORM: torch.zeros(64)}, ["model.norm.weight", "all zeros"]),
        ({NORM: torch.full((64,), float("nan"))}, ["model.norm.weight", "infinity or NaN"]),
    ],
)
def test_tensors_are_named_for_the_model_of_transformers(changes: dict, words: list[str], tmp_path: Path) -> None:
    save("llama", tmp_path)
    change_tensors(tmp_path, **changes)
    with pytest.raises(ValueError) as error:
        load_transformers(tmp_path)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in [str(tmp_path), *words])


def test_norms_without_gain_are_told_from_those_that_add_one(seed: int, tmp_path: Path) -> None:
    """Zeros in every norm, as a new Gemma has them, load where they are a gain of 1; in LayerNorm they are none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = CONFIGS["llama"][1] | {"head_dim": 16}
    for kind in ("gemma", "gemma2", "gemma3_text"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        assert not any(p.any() for name, p in model.named_parameters() if name.endswith("layernorm.weight"))
        model.save_pretrained(tmp_path / kind)
        tokens = torch.randint(VOCAB, (2, 16))
        with torch.no_grad():
            torch.testing.assert_close(load_transformers(tmp_path / kind)(tokens), model.eval()(tokens).logits)
    save("gpt2", tmp_path / "gpt2")
    change_tensors(tmp_path / "gpt2", transformer__h__1__ln_2__weight=torch.zeros(64))
    with pytest.raises(ValueError, match=r"transformer.h.1.ln_2.weight in .* is all zeros"):
        load_transformers(tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "64"}, "hidden_size|wrong kind"),
        ({"num_attention_heads": 0}, "config.json|n_heads"),
        ({"quantization_config": "compressed-tensors"}, "quantised with compressed-tensors"),
    ],
)
@pytest.mark.parametrize("load", [load_decoder, load_transformers])
def test_wrong_values_in_the_config_are_errors_of_the_user(load: Any, changes: dict, word: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=word) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tied_head_that_is_stored_must_be_the_embedding(seed: int, tmp_path: Path) -> None:
    theirs = save("qwen2-tied", tmp_path)
    embedding = theirs.model.embed_tokens.weight.detach()
    change_tensors(tmp_path, lm_head__weight=embedding.clone())
    assert load_decoder(tmp_path).lm_head is None
    change_tensors(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ValueError, match=r"lm_head.weight.*tie_word_embeddings"):
        load_decoder(tmp_path)


def test_unknown_to_the_decoder_and_to_transformers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    change_config(tmp_path, model_type="fantasy")
    with pytest.raises(ValueError, match=r"model_type 'fantasy'.*model.as=transformers"):
        load_decoder(tmp_path)
    with pytest.raises(ValueError, match="architecture that transformers does not know"):
        load_transformers(tmp_path)
    change_config(tmp_path, model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})
    for load in (load_decoder, load_transformers):
        with pytest.raises(ValueError, match="quantised with gptq"):
            load(tmp_path)


# --- memory

MEASURE = """
import json, sys
import octavo.hf
def resident(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))
small, large, way = sys.argv[1:]
def load(folder):
    return octavo.hf.load_transformers(folder) if way == "transformers" else octavo.hf.load_decoder(folder, recipe=way)
load(small)  # whatever is imported at the first use is there now
base = resident("VmHWM:")
model = load(large)
print(json.dumps([resident("VmHWM:") - base, sum(p.numel() for p in model.parameters())]))
"""


def _write_llama(folder: Path, layers: int, vocab: int, dtype: torch.dtype) -> int:
    """A LLaMA checkpoint of width 512, in two shards; returns its bytes."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": layers}
    config |= {
        "num_attention_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, 512), "model.norm.weight": (512,)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= {f"{prefix}.self_attn.{p}_proj.weight": (512, 512) for p in "qkvo"}
        shapes |= {f"{prefix}.mlp.{p}_proj.weight": (1280, 512) for p in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (512, 1280)}
        shapes |= {f"{prefix}.{p}_layernorm.weight": (512,) for p in ("input", "post_attention")}
    names, half = list(shapes), len(shapes) // 2
    files = {f"model-0000{i + 1}-of-00002.safetensors": part for i, part in enumerate((names[:half], names[half:]))}
    for file, part in files.items():
        save_file(
            {name: torch.ones(shapes[name], dtype=dtype) for name in part}, folder / file, metadata={"format": "pt"}
        )
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum((folder / file).stat().st_size for file in files)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory where Linux shows it")
@pytest.mark.parametrize(
    ("dtype", "way"), [(torch.float32, "bf16"), (torch.bfloat16, "O2"), (torch.float32, "transformers")]
)
def test_loading_takes_the_memory_of_the_checkpoint_and_a_tenth(dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    """Peak resident memory, mapped files counted, over that of the interpreter; in BF16 with O2, whose masters have 2 bytes too."""
    _write_llama(tmp_path / "small", 1, 128, dtype)
    size = _write_llama(tmp_path / "large", 18 if dtype is torch.float32 else 36, 2048, dtype)
    assert size > 200e6
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment).stdout
    peak, parameters = json.loads(output)
    assert parameters * dtype.itemsize == pytest.approx(size, rel=0.01)
    assert peak <= 1.1 * size, f"{peak / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB"
    print(f"{dtype} {way}: peak {peak / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB")


def test_a_model_in_bf16_keeps_its_rotary_frequencies(seed: int, tmp_path: Path) -> None:
    """As `from_pretrained(dtype=bfloat16)` does, and `.to(bfloat16)` does not."""
    from transformers import AutoModelForCausalLM

    save("llama", tmp_path)
    tokens = torch.randint(VOCAB, (1, 40))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load_transformers(tmp_path, parameters=torch.bfloat16)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert torch.equal(ours(tokens), theirs(tokens).logits)
