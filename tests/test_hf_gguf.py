"""GGUF files become checkpoints with exactly the values that the format's own library de-quantises, and the tokenizer's ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import tensors_of

from octavo.data.tokenizers import FileTokenizer
from octavo.hf import convert_gguf, load_decoder
from octavo.hf.gguf import cached_conversion

DIM, FFN, HEADS, KV, LAYERS = 64, 128, 4, 2, 2
BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
TOKENS = ["<|endoftext|>", *BYTES, "he", "ll", "hell", "hello"]


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A LLaMA with Q4_1 matrices and F32 norms, in the manner of llama.cpp; returns the stored values by GGUF name."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_rope_freq_base(20_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    shapes = {"token_embd": (len(TOKENS), DIM), "output_norm": (DIM,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_q": (DIM, DIM), f"blk.{i}.attn_output": (DIM, DIM)}
        shapes |= {f"blk.{i}.{name}": (DIM * KV // HEADS, DIM) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (FFN, DIM) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{i}.ffn_down": (DIM, FFN), f"blk.{i}.attn_norm": (DIM,), f"blk.{i}.ffn_norm": (DIM,)}
    stored = {}
    for name, shape in shapes.items():
        values = np.random.randn(*shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        stored[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def test_values_sizes_and_tokenizer(seed: int, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "model.gguf")
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    tensors = tensors_of(folder)
    names = {
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
    }
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for i in range(LAYERS):
        for theirs, ours in names.items():
            assert torch.equal(
                tensors[f"model.layers.{i}.{ours}.weight"], torch.from_numpy(stored[f"blk.{i}.{theirs}"])
            )
        # llama.cpp rotates neighbouring channels, so that it holds the rows of queries and keys in another order
        for theirs, ours, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV)):
            rows = stored[f"blk.{i}.{theirs}"].reshape(heads, DIM // HEADS // 2, 2, DIM).swapaxes(1, 2).reshape(-1, DIM)
            assert torch.equal(tensors[f"model.layers.{i}.self_attn.{ours}.weight"], torch.from_numpy(rows.copy()))
    assert torch.equal(tensors["model.embed_tokens.weight"], torch.from_numpy(stored["token_embd"]))
    model = load_decoder(folder)
    assert model.config.rope_theta == 20_000 and model.config.kv_heads == KV and model.config.max_seq_len == 128
    assert model.config.tie_embeddings and model.config.vocab_size == len(TOKENS)
    tokenizer = FileTokenizer(folder)
    assert tokenizer.eot == 0 and tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.encode_batch(["hello"])[0].tolist() == [TOKENS.index("hello")]


def test_a_conversion_is_kept_under_the_files_content(seed: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = cached_conversion(tmp_path / "model.gguf", tmp_path / "cache")
    stamp = (folder / "config.json").stat().st_mtime_ns
    (tmp_path / "model.gguf").rename(tmp_path / "renamed.gguf")
    assert cached_conversion(tmp_path / "renamed.gguf", tmp_path / "cache") == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp and len(list((tmp_path / "cache").iterdir())) == 1


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("some text")
    with pytest.raises(ValueError, match="is no GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")
    write_gguf(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut.gguf cannot be read"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match="not empty"):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
    assert not (tmp_path / "out").exists()
