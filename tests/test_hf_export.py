"""Checkpoints out: transformers loads them, with our logits; import → export → import moves no bit; FP8 weights are ours exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, VOCAB, random_model, same_bits, save, tensors_of

from octavo.convert import convert
from octavo.formats import E4M3
from octavo.hf import CausalLM, export, load_decoder, load_transformers
from octavo.hf.export import quantise_weight, to_bf16
from octavo.kernels import scale_from_amax
from octavo.linear.gemm import weight_operand
from octavo.models import SIZES, Transformer
from octavo.tensor import ScaledTensor, cast


def from_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it; every tensor must have found its place."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def randomise(model: Transformer) -> Transformer:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(gain + (0.15 if parameter.ndim > 1 else 0.3) * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_import_and_export_move_no_bit(name: str, seed: int, tmp_path: Path) -> None:
    """Either way of importing; and once more."""
    save(name, tmp_path / "source", torch.bfloat16)
    original = tensors_of(tmp_path / "source")
    export(load_decoder(tmp_path / "source"), tmp_path / "decoder", source=tmp_path / "source")
    export(load_transformers(tmp_path / "source"), tmp_path / "itself")
    export(load_decoder(tmp_path / "decoder"), tmp_path / "again")
    for folder in ("decoder", "itself", "again"):
        assert same_bits(tensors_of(tmp_path / folder), original), folder
    kinds = {
        json.loads((tmp_path / f / "config.json").read_text())["model_type"] for f in ("source", "decoder", "itself")
    }
    assert kinds == {CONFIGS[name][0]}


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "gpt-gqa", "untied"])
def test_new_models_are_a_published_family(name: str, seed: int, tmp_path: Path) -> None:
    """Both dialects, with grouped queries and untied heads, have the same logits in transformers."""
    changes = {"gpt-gqa": {"n_heads": 4, "n_kv_heads": 2}, "untied": {"tie_embeddings": False}}.get(name, {})
    config = dataclasses.replace(SIZES["tiny-llama" if "llama" in name else "tiny"], dtype=torch.float32, **changes)
    model = randomise(Transformer.build(config, seed=seed))
    model.load_state_dict({key: value.bfloat16().float() for key, value in model.state_dict().items()})
    folder = export(model, tmp_path / "out", "byte")
    theirs = from_transformers(folder)
    assert type(theirs).__name__ == ("LlamaForCausalLM" if "llama" in name else "Starcoder2ForCausalLM")
    tokens = torch.randint(257, (2, 40))
    with torch.no_grad():
        logits = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(
            model(tokens[:, :-1], tokens[:, 1:]), theirs(tokens, labels=tokens).loss, rtol=1e-5, atol=1e-5
        )
    assert theirs.get_input_embeddings().weight.shape[0] == 257 and theirs.config.eos_token_id == 256
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_masters_are_rounded_once(recipe: str, seed: int, tmp_path: Path) -> None:
    """An FP16 code over its scale, in FP64, rounded to BF16; the model is as it was, and exported FP32 weights are rounded alike."""
    save("llama", tmp_path / "source")
    model = load_decoder(tmp_path / "source", recipe=recipe)
    weight = model.blocks[1].ffn.out.weight
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export(model, tmp_path / "out")
    exported = tensors_of(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"]
    real = weight.codes.double() / weight.scale.double() if isinstance(weight, ScaledTensor) else weight.double()
    assert exported.dtype == torch.bfloat16 and torch.equal(exported, real.to(torch.bfloat16))
    assert same_bits(model.state_dict(), before)
    embedding = tensors_of(tmp_path / "out")["model.embed_tokens.weight"]
    assert embedding.shape[0] == VOCAB and torch.equal(embedding, model.embedding.weight[:VOCAB].bfloat16())


def test_rounding_is_to_nearest_even_from_the_master(seed: int) -> None:
    """FP16 has three bits more than BF16: ties are common, and go to the even code."""
    master = cast(torch.randn(64, 64) * 10 ** torch.empty(64, 1).uniform_(-3, 3), _fp16())
    real = master.codes.double() / master.scale.double()
    bf16 = to_bf16(master).double()
    spacing = torch.exp2(real.abs().log2().floor() - 7)
    assert ((bf16 - real).abs() <= spacing / 2).all()
    ties = (bf16 - real).abs() == spacing / 2
    assert ties.any() and ((bf16[ties] / spacing[ties]) % 2 == 0).all()


def _fp16() -> Any:
    from octavo.formats import FP16

    return FP16


# --- FP8


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_fp8_weights_are_loaded_exactly(name: str, seed: int, tmp_path: Path) -> None:
    """By transformers on the CPU and by us: equal weights bit for bit, so equal logits; exported again, equal codes."""
    save(name, tmp_path / "source", torch.bfloat16)
    export(load_decoder(tmp_path / "source"), tmp_path / "fp8", source=tmp_path / "source", format="fp8")
    stored = tensors_of(tmp_path / "fp8")
    quantised = {key for key, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    linears = {key for key, value in stored.items() if key.startswith("model.layers") and value.ndim == 2}
    assert quantised == linears and all(f"{key}_scale" in stored for key in quantised)
    rest = {value.dtype for key, value in stored.items() if key not in quantised and not key.endswith("_scale")}
    assert rest == {torch.bfloat16}

    ours, theirs = load_decoder(tmp_path / "fp8"), from_transformers(tmp_path / "fp8")
    tokens = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    weights = dict(theirs.named_parameters())  # de-quantised by the first forward
    for key in quantised:
        real = stored[key].float() * stored[f"{key}_scale"]
        assert torch.equal(weights[key], real)
        source = tensors_of(tmp_path / "source")[key].float()
        assert ((real - source).abs() <= source.abs() / 16 + stored[f"{key}_scale"] * 2**-10).all()  # half a code
    assert torch.equal(ours.blocks[1].attention.out.weight, weights["model.layers.1.self_attn.o_proj.weight"])
    export(ours, tmp_path / "again", source=tmp_path / "source", format="fp8")
    assert same_bits(tensors_of(tmp_path / "again"), stored)
    itself = load_transformers(tmp_path / "fp8")
    assert torch.equal(
        itself.model.model.layers[0].self_attn.q_proj.weight, weights["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("recipe", ["O1", "O2"])
def test_fp8_codes_are_those_of_the_forward(recipe: str, seed: int, tmp_path: Path) -> None:
    """What training multiplies with is what is exported, also of queries, keys and values, which share a scale."""
    save("llama", tmp_path / "source")
    model = load_decoder(tmp_path / "source", recipe=recipe)
    export(model, tmp_path / "fp8", format="fp8")
    stored, attention = tensors_of(tmp_path / "fp8"), model.blocks[0].attention
    codes = torch.cat([stored[f"model.layers.0.self_attn.{part}_proj.weight"].view(torch.uint8) for part in "qkv"])
    operand = weight_operand(attention.qkv.weight, E4M3, power_of_two=True, row=True, col=False, stats=None)
    assert torch.equal(operand.codes.view(torch.uint8), codes)
    assert stored["model.layers.0.self_attn.k_proj.weight_scale"].item() * operand.scale.item() == 1.0


def test_quantised_weights_use_the_whole_range(seed: int) -> None:
    weight = torch.randn(40, 50) * 10.0 ** float(torch.empty(()).uniform_(-4, 4))
    codes, scale = quantise_weight(weight)
    assert scale.shape == (1,) and scale == 1 / scale_from_amax(weight.abs().max(), E4M3.max)
    assert 224 <= codes.float().abs().max() <= 448


def test_models_of_transformers_in_fp8(seed: int, tmp_path: Path) -> None:
    """Converted by octavo or not; a layer that octavo leaves stays BF16 and is named in the config."""
    model = random_model("qwen2", torch.bfloat16, intermediate_size=24)
    export(model, tmp_path / "plain", format="fp8")
    quantization = json.loads((tmp_path / "plain" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in quantization["ignore"] and "model.layers.1.mlp.down_proj" in quantization["ignore"]
    assert tensors_of(tmp_path / "plain")["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    export(CausalLM(convert(model, "O2"), torch.float32), tmp_path / "converted", format="fp8")
    assert same_bits(tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "converted"))
    tokens = torch.randint(VOCAB, (1, 20))
    theirs, ours = from_transformers(tmp_path / "plain"), load_decoder(tmp_path / "plain")
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-4)


def test_gpt2_has_no_fp8_form(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "source")
    for model in (load_decoder(tmp_path / "source"), load_transformers(tmp_path / "source")):
        with pytest.raises(ValueError, match=r"Conv1D.*bf16"):
            export(model, tmp_path / "out", format="fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- files


def test_shards_and_their_index(seed: int, tmp_path: Path) -> None:
    model = random_model("llama", torch.bfloat16)
    export(model, tmp_path / "one")
    export(model, tmp_path / "many", shard_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "many" / file).stat().st_size < 60_000 for file in files)
    assert same_bits(tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many"))
    tokens = torch.randint(VOCAB, (1, 9))
    one, many = (from_transformers(tmp_path / name, torch.bfloat16) for name in ("one", "many"))
    assert torch.equal(one(tokens).logits, many(tokens).logits)


def test_settings_of_the_source_are_kept(seed: int, tmp_path: Path) -> None:
    model = save("mistral", tmp_path / "source", initializer_range=0.125)
    model.generation_config.temperature = 0.75
    model.generation_config.do_sample = True
    model.generation_config.save_pretrained(tmp_path / "source")
    export(load_decoder(tmp_path / "source"), tmp_path / "out", source=tmp_path / "source")
    kept = from_transformers(tmp_path / "out")
    assert kept.config.initializer_range == 0.125 and kept.config.sliding_window == 64
    assert kept.generation_config.temperature == 0.75 and kept.config.dtype is not None
    with pytest.raises(ValueError, match="not the architecture"):
        export(Transformer.build(SIZES["tiny-llama"]), tmp_path / "other", source=tmp_path / "source")


def test_nothing_is_overwritten_or_left_half_done(tmp_path: Path) -> None:
    model = Transformer.build(SIZES["tiny-llama"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("text")
    with pytest.raises(ValueError, match="not empty"):
        export(model, tmp_path / "full")
    with pytest.raises(ValueError, match="not empty"):
        export(model, tmp_path / "full" / "precious")
    with pytest.raises(ValueError, match="format is 'fp4'"):
        export(model, tmp_path / "out", format="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Sequential cannot be exported"):
        export(torch.nn.Sequential(), tmp_path / "out")
    with pytest.raises(ValueError, match="nothing.json"):
        export(model, tmp_path / "out", tmp_path / "nothing.json")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"cannot be written.*No space left on device"):
        export(Transformer.build(SIZES["tiny-llama"]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
