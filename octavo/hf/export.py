"""A model into a folder that transformers loads: BF16 safetensors, or FP8 weights in the compressed-tensors layout.

Values are the real ones, rounded once: a master of FP16 and a scale is de-quantised to FP32, where it is exact, and from there
to BF16 to nearest. In FP8, each weight of a linear layer becomes the E4M3 codes and the power-of-two scale that octavo's forward
multiplies with in training, and `weight_scale` is its reciprocal: the de-quantised weight is exact in BF16. Embeddings, heads,
norms and biases stay BF16. A shard holds up to 5 GB and is written before the next is made; the folder appears complete or not
at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo.convert.policy import DefaultPolicy, fp8_class
from octavo.formats import E4M3
from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import INDEX, SCALE, SINGLE, Checkpoint
from octavo.hf.config import decoder_config, hf_config, same_architecture
from octavo.hf.families import family_of, pieces
from octavo.hf.tokenizer_files import write_tokenizer
from octavo.linear import FP8Linear
from octavo.models import Transformer
from octavo.tensor import ScaledTensor, cast, uncast

SHARD_BYTES = 5_000_000_000
FORMATS = ("bf16", "fp8")


def export(
    model: nn.Module,
    folder: str | Path,
    tokenizer: str | Path | None = None,
    *,
    source: str | Path | None = None,
    format: Literal["bf16", "fp8"] = "bf16",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes `model` to `folder`, which must be new or empty, and returns the folder.

    Args:
        model: a `Transformer`, a model of transformers, or a `CausalLM` with one; converted to FP8 or not. It is not changed.
        tokenizer: "byte", a tokenizer.json or a folder with one; default: that of `source`, if it has one.
        source: the checkpoint (its config.json is enough) that the model began from: its family, special tokens and generation
            settings are kept. Without one a `Transformer` becomes the published family that computes the same.
        format: "bf16", or "fp8" for E4M3 weights with one scale a tensor in the layout of compressed-tensors.

    Raises `ValueError` if the folder is in use, the model is of another architecture than `source` or has none in transformers, or
    its layers cannot be FP8; `OSError` if the disk is full.
    """
    folder = Path(folder).expanduser()
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}: use 'bf16' or 'fp8'")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: choose another folder, or remove it")
    origin = None if source is None else Checkpoint.open(source)
    if tokenizer is None and origin is not None and origin.tokenizer is not None:
        tokenizer = origin.path
    inner = model.model if isinstance(model, CausalLM) else model
    building = folder.parent / f".building-{folder.name}"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        eot = None if tokenizer is None else write_tokenizer(tokenizer, building)
        config, tensors = _parts(inner, origin, eot, format)
        _write_shards(tensors, building, shard_bytes)
        (building / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if origin is not None and (origin.path / "generation_config.json").is_file():
            shutil.copyfile(origin.path / "generation_config.json", building / "generation_config.json")
        if folder.exists():
            folder.rmdir()
        os.rename(building, folder)
    except OSError as error:
        raise OSError(
            f"the model cannot be written to {folder} ({error.strerror or error}): free space or choose another"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _parts(
    model: nn.Module, origin: Checkpoint | None, eot: int | None, format: str
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """(config.json, tensors in order)."""
    if isinstance(model, Transformer):
        values = _decoder_values(model, origin, eot)
        if format == "fp8" and family_of(values, "the model").input_first:
            raise ValueError(
                f"a {values['model_type']} model keeps its weights in Conv1D layers, which compressed-tensors does not know: "
                "export it as bf16"
            )
        tensors = _decoder_tensors(model, values, quantise=format == "fp8")
        kept = ["lm_head"]
    elif hasattr(model, "config") and hasattr(model, "save_pretrained"):
        values = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
        values["architectures"] = [type(model).__name__]
        quantised = _quantised_layers(model) if format == "fp8" else {}
        tensors = _state_tensors(model, quantised)
        kept = [name for name, module in model.named_modules() if _linear(module) and name not in quantised]
    else:
        raise ValueError(
            f"a {type(model).__name__} cannot be exported: give an octavo Transformer or a model of transformers"
        )
    for name in ("quantization_config", "torch_dtype", "_name_or_path", "transformers_version"):
        values.pop(name, None)
    values["dtype"] = "bfloat16"
    if format == "fp8":
        values["quantization_config"] = quantization_config(kept)
    return values, tensors


def _decoder_values(model: Transformer, origin: Checkpoint | None, eot: int | None) -> dict[str, Any]:
    if origin is None:
        return hf_config(model.config, eot)
    if not same_architecture(decoder_config(origin.config, origin.path), model.config):
        raise ValueError(f"the model has not the architecture of {origin.path}/config.json: leave the source out")
    return dict(origin.config)


def _decoder_tensors(model: Transformer, values: dict[str, Any], quantise: bool) -> Iterator[tuple[str, Tensor]]:
    family = family_of(values, "the model")
    layers = {name: module for name, module in model.named_modules() if name.startswith("blocks.") and _linear(module)}
    for name, parameter in model.named_parameters():
        scale = None
        if quantise and name.rpartition(".")[0] in layers and name.endswith(".weight"):
            stored, scale = quantise_weight(parameter)
        else:
            stored = to_bf16(parameter)
        for piece in pieces(family, model.config, name):
            rows = stored[piece.start : piece.stop]
            yield piece.name, (rows.t() if piece.transposed else rows)
            if scale is not None:
                yield piece.name + SCALE, scale


def _state_tensors(model: nn.Module, quantised: dict[str, FP8Linear | nn.Linear]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and persistent buffer once, under the first of its names; tied ones are tied again when loaded."""
    names = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in names:
            continue
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in quantised:
            codes, scale = quantise_weight(tensor)
            yield name, codes
            yield name + SCALE, scale
        else:
            yield name, to_bf16(tensor) if tensor.is_floating_point() else tensor


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, FP8Linear) and not module.input_first)


def _quantised_layers(model: nn.Module) -> dict[str, Any]:
    """The linear layers that become FP8: those that octavo trains in FP8, or would. Raises `ValueError` if there are none."""
    policy = DefaultPolicy(model)
    converted = any(isinstance(module, FP8Linear) for module in model.modules())
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear) if converted else fp8_class(module) and policy.reason(module, name) is None:
            if module.__class__.__name__ in ("Conv1D", "FP8Conv1D"):
                raise ValueError(
                    f"{name} is a Conv1D layer, which compressed-tensors does not know: export the model as bf16"
                )
            found[name] = module
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer that can be FP8: export it as bf16")
    return found


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 codes, reciprocal scale FP32 [1]) of a weight: the codes that its layer multiplies with in training."""
    real = uncast(weight.detach(), torch.float32)
    scaled = cast(real, E4M3)
    return scaled.codes.cpu(), scaled.scale.reciprocal().reshape(1).cpu()


def to_bf16(tensor: Tensor) -> Tensor:
    """The real values in BF16 on the CPU, rounded once, to nearest."""
    real = uncast(tensor.detach(), torch.float32) if isinstance(tensor, ScaledTensor) else tensor.detach()
    return real.to(torch.bfloat16).cpu()


def quantization_config(kept: list[str]) -> dict[str, Any]:
    """What config.json says of FP8 weights: all linear layers but `kept`, one symmetric scale a tensor, activations plain."""
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": kept,
    }


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int) -> None:
    """One file, or shards of up to `limit` bytes and their index."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError("checkpoints need the package safetensors: pip install '.[hf]' in octavo's folder") from None
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(held, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if held and size + count > limit:
            flush()
            size = 0
        held[name] = tensor.clone(memory_format=torch.contiguous_format)
        size, total = size + count, total + count
    flush()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
