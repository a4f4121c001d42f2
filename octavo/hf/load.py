"""A checkpoint into a model, in the memory of the finished model and a few MB.

Two ways. `load_decoder` builds our `Transformer` on the meta device and fills it parameter by parameter from slices of the files;
each block is converted before the next is read. `load_transformers` takes the model of transformers itself, any family that it
knows. Both check names and shapes of all tensors first, and refuse a matrix of zeros, a norm without gain or a value that is not
finite by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import SCALE, Checkpoint, _more
from octavo.hf.config import OTHER_WAY, decoder_config, warn_of_dropout
from octavo.hf.families import Family, family_of, pieces
from octavo.hf.values import check_gains, check_values, not_finite, zeros
from octavo.models import Transformer, TransformerConfig
from octavo.recipe import Recipe

HEAD = "lm_head.weight"
ACTIVATION_SCALES = ("input_scale", "output_scale")
"""Ends of the names of scales that a quantised checkpoint may hold for activations: training takes its own."""


def load_decoder(
    source: str | Path | Checkpoint,
    *,
    recipe: str | Recipe | None = None,
    device: str | torch.device = "cpu",
    config: TransformerConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Our decoder with the weights of a LLaMA-, Mistral-, Qwen2-, GPT-2- or Starcoder2-family checkpoint.

    Parameters are FP32 (those of converted layers as `recipe` says), activations `dtype`; `config` replaces the one that
    config.json gives, for other values of `dtype`, `recompute` and the like. Raises `ValueError` naming the feature that the
    decoder cannot express, or the tensor that is missing, unexpected, of another shape, all zeros or not finite.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    if config is None:
        config = decoder_config(checkpoint.config, checkpoint.path, dtype)
    fill = DecoderValues(checkpoint, config)
    return Transformer.build(config, recipe=recipe, device=device, fill=fill)


class DecoderValues:
    """`values(name, parameter)` writes the checkpoint's values into a parameter of the decoder; all is checked at the start."""

    def __init__(self, checkpoint: Checkpoint, config: TransformerConfig) -> None:
        check_quantization(checkpoint)
        warn_of_dropout(checkpoint.config, checkpoint.path)
        self._checkpoint, self._config = checkpoint, config
        self._family = family_of(checkpoint.config, checkpoint.path)
        self._block = ""
        self._body = _body(self._family, checkpoint.tensors)
        with torch.device("meta"):
            parameters = {name: tuple(p.shape) for name, p in Transformer(config).named_parameters()}
        wanted = {
            piece.name: piece.shape(shape[1:])
            for name, shape in parameters.items()
            for piece in pieces(self._family, config, name, self._body)
        }
        self._check_names(wanted)
        for name, shape in wanted.items():
            found = checkpoint.tensors[name]
            if found.shape != shape:
                raise ValueError(f"{name} in {found.file} has shape {found.shape}, and config.json asks for {shape}")

    def _check_names(self, wanted: dict[str, Any]) -> None:
        path, tensors = self._checkpoint.path, self._checkpoint.tensors
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise ValueError(f"{path} lacks the tensor {missing[0]}{_more(missing)}, which its config.json asks for")
        scales = {name + SCALE for name in wanted}
        extra = [
            name
            for name in tensors
            if name not in wanted
            and name not in scales
            and not name.endswith((*self._family.derived, *ACTIVATION_SCALES))
        ]
        if HEAD in extra and self._config.tie_embeddings:
            self._check_tied()
            extra.remove(HEAD)
        if extra:
            raise ValueError(
                f"{path} holds the tensor {extra[0]}{_more(extra)}, which a {self._checkpoint.config['model_type']} decoder of this "
                f"config.json has no place for: {OTHER_WAY}"
            )

    def _check_tied(self) -> None:
        """A tied head that is stored all the same must be the embedding."""
        (embedding,) = pieces(self._family, self._config, "embedding.weight", self._body)
        tensors = self._checkpoint.tensors
        same = tensors[HEAD].shape == tensors[embedding.name].shape and all(
            torch.equal(a, b)
            for (_, a), (_, b) in zip(self._checkpoint.read(HEAD), self._checkpoint.read(embedding.name), strict=True)
        )
        if not same:
            raise ValueError(
                f"{self._checkpoint.path} holds {HEAD} of its own although config.json ties it to {embedding.name}: "
                "set tie_word_embeddings to false there, or remove the tensor"
            )

    def __call__(self, name: str, parameter: Tensor) -> None:
        """Writes the real values of all pieces, and zeros in the padding."""
        if name.startswith("blocks.") and name.split(".")[1] != self._block:
            self._block = name.split(".")[1]
            _return_freed_memory()
        stop = 0
        for piece in pieces(self._family, self._config, name, self._body):
            target = parameter[piece.start : piece.stop]
            nonzero = torch.zeros((), dtype=torch.bool)
            for rows, values in self._checkpoint.read(piece.name):
                self._check_finite(piece.name, values)
                nonzero |= values.any()
                (target.t() if piece.transposed else target)[rows] = values.to(parameter.device, parameter.dtype)
            if name.endswith("weight") and not nonzero:
                raise ValueError(zeros(piece.name, self._checkpoint.path))
            stop = piece.stop
        parameter[stop:] = 0

    def _check_finite(self, name: str, values: Tensor) -> None:
        if not values.isfinite().all():
            raise ValueError(not_finite(name, self._checkpoint.path))


def _return_freed_memory() -> None:
    """Gives freed pages back to the system, where the C library can.

    The FP32 parameters of a block give place to masters of half their size, and the holes between those would stay resident.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _body(family: Family, names: Iterable[str]) -> str:
    """The prefix of the tensors; a checkpoint of the bare model, without a head, has none."""
    return family.body if any(name.startswith(family.body) for name in names) else ""


def check_quantization(checkpoint: Checkpoint) -> None:
    """Raises `ValueError` for a checkpoint whose weights are quantised in a way that octavo cannot read."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None:
        return
    known = isinstance(quantization, dict) and quantization.get("format") in ("float-quantized", "naive-quantized")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "compressed-tensors" or not known:
        raise ValueError(
            f"{checkpoint.path} is quantised with {method}: octavo reads plain weights, FP8 ones of compressed-tensors, and GGUF; "
            "de-quantise it first"
        )


def load_transformers(
    source: str | Path | Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    parameters: torch.dtype = torch.float32,
    weights: bool = True,
) -> CausalLM:
    """The model of transformers itself, its parameters in `parameters`, on the CPU; products compute in `dtype`.

    For a model that is wholly in BF16 give `parameters`: `.to(torch.bfloat16)` would round its rotary frequencies, too. Without
    `weights` it is built from config.json alone, to be filled by a checkpoint of octavo. Raises `ValueError` for an
    architecture that transformers does not know and for tensors as in `load_decoder`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    library = libraries()
    path = str(checkpoint.path)
    check_quantization(checkpoint)
    empty = library.accelerate.init_empty_weights(include_buffers=False) if weights else contextlib.nullcontext()
    try:
        config = library.transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with empty:
            model = library.transformers.AutoModelForCausalLM.from_config(config, dtype=parameters)
    except Exception as error:  # a wrong value in config.json raises what each architecture pleases
        raise ValueError(
            f"{path}/config.json is of an architecture that transformers does not know, or damaged: {_first_line(error)}"
        ) from None
    if not weights:
        return CausalLM(model, dtype)
    model.tie_weights()  # which making them empty has undone
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {
        name: info.shape for name, info in checkpoint.tensors.items() if not name.endswith((SCALE, *ACTIVATION_SCALES))
    }
    if found == shapes and not model.state_dict().keys() - _names_with_ties(model):
        _fill(model, checkpoint)
    else:  # tensors that the library renames, merges or leaves out as it loads, or wrong ones
        model = _from_pretrained(library.transformers, checkpoint, parameters)
    check_gains(model.eval(), checkpoint.path)
    return CausalLM(model, dtype)


def _names_with_ties(model: Any) -> set[str]:
    """All names of parameters, those of tied ones too."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def _fill(model: Any, checkpoint: Checkpoint) -> None:
    """Allocates each parameter and writes it from slices of the files, so that memory holds nothing twice."""
    filled: dict[int, torch.nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, empty in list(module._parameters.items()):
            if empty is None:
                continue
            if id(empty) not in filled:
                name = names[id(empty)]
                values = torch.empty(empty.shape, dtype=empty.dtype)
                for rows, part in checkpoint.read(name):
                    (values if values.ndim else values[None])[rows] = part.to(values.dtype)
                check_values(name, values, checkpoint.path)
                filled[id(empty)] = torch.nn.Parameter(values)
                _return_freed_memory()
            module._parameters[key] = filled[id(empty)]


def _from_pretrained(library: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The library's own way, which knows the names of every family and version, at the memory of model and checkpoint."""
    path = str(checkpoint.path)
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are reported by name, too
    if "quantization_config" in checkpoint.config:
        options["quantization_config"] = library.CompressedTensorsConfig(dequantize=True)
    try:
        with warnings.catch_warnings():
            # With a config is how it is told to de-quantise.
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            model, report = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise ValueError(f"{path} cannot be loaded by transformers: {_first_line(error)}") from None
    for what, word in _PROBLEMS.items():
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in report[what])
        if names:
            raise ValueError(
                f"{path} {word} the tensor {names[0]}{_more(names)}: take config.json and weights of one checkpoint"
            )
    for name, parameter in model.named_parameters():
        check_values(name, parameter, checkpoint.path)
    return model


_PROBLEMS = {
    "missing_keys": "lacks",
    "mismatched_keys": "has another shape of",
    "unexpected_keys": "has no place for",
}


class Libraries(NamedTuple):
    """The packages that models of transformers need."""

    transformers: Any
    accelerate: Any


def libraries() -> Libraries:
    """Imports them. Raises `ValueError` if they are not installed."""
    try:
        import accelerate
        import transformers
    except ImportError as error:
        raise ValueError(
            f"this needs the packages transformers and accelerate: pip install '.[hf]' in octavo's folder ({error})"
        ) from None
    return Libraries(transformers, accelerate)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
