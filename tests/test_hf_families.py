"""Every parameter of the decoder is made of tensors of the family, each used once and in full."""

from __future__ import annotations

import pytest
import torch
from hf_models import CONFIGS, random_model

from octavo.hf.config import decoder_config
from octavo.hf.families import FAMILIES, family_of, pieces
from octavo.models import Transformer


@pytest.mark.parametrize("name", CONFIGS)
def test_pieces_are_the_tensors_of_transformers(name: str) -> None:
    kind, settings = CONFIGS[name]
    config = decoder_config({**settings, "model_type": kind}, "x")
    theirs = {key: tuple(value.shape) for key, value in random_model(name).named_parameters()}
    with torch.device("meta"):
        ours = Transformer(config)
    found: dict[str, tuple[int, ...]] = {}
    for parameter, value in ours.named_parameters():
        parts = pieces(FAMILIES[kind], config, parameter)
        assert parts[0].start == 0 and all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
        rows = config.vocab_size if parameter.startswith(("embedding", "lm_head")) else len(value)
        assert parts[-1].stop == rows
        assert not found.keys() & {part.name for part in parts}
        found |= {part.name: part.shape(tuple(value.shape[1:])) for part in parts}
    assert found == theirs


def test_unknown_families_name_the_other_way() -> None:
    with pytest.raises(ValueError, match="FOLDER has model_type 'mamba'.*model.as=transformers"):
        family_of({"model_type": "mamba"}, "FOLDER")
