"""Hugging Face checkpoints in and out.

`load_decoder` maps a checkpoint onto our decoder, `load_transformers` takes the model of transformers itself; `export` writes
either as BF16 or FP8 safetensors that transformers loads; `convert_gguf` turns a GGUF file into such a folder.
"""

from octavo.hf.causal_lm import CausalLM
from octavo.hf.checkpoint import Checkpoint
from octavo.hf.export import export
from octavo.hf.gguf import convert_gguf
from octavo.hf.load import load_decoder, load_transformers

__all__ = ["CausalLM", "Checkpoint", "convert_gguf", "export", "load_decoder", "load_transformers"]
