"""Small models and tokenizers in folders, for the tests of evaluation. transformers and lm_eval are imported where used."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

WORDS = (
    "the a cat dog river stone runs sleeps under over bright old and but because therefore it was not in of to "
    "question answer yes no water fire house tree"
).split()


def sentence(rng: random.Random, words: int) -> str:
    """Some words, with a capital and a full stop."""
    text = " ".join(rng.choice(WORDS) for _ in range(words))
    return text[0].upper() + text[1:] + "."


def save_tokenizer(folder: Path, bos: bool = False, extra: int = 0) -> Any:
    """A trained byte-level BPE of transformers in `folder`; with `bos` it puts <s> before each text, as LLaMA's does.

    `extra` tokens are added to those that it learned.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"] if bos else ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokenizer.train_from_iterator([sentence(rng, 12) for _ in range(300)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>"} if bos else {"eos_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.add_tokens([f"extra{number}" for number in range(extra)])
    wrapped.save_pretrained(folder)
    return wrapped


def save_llama(folder: Path, seed: int, window: int = 64, bos: bool = True) -> Path:
    """A small random LLaMA with grouped heads and a tokenizer; weights large enough that its predictions differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = save_tokenizer(folder, bos)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_gpt2(folder: Path, seed: int, window: int = 64) -> Path:
    """A small random GPT-2, tied, whose tokenizer has an end-of-text token only."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = save_tokenizer(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=window,
        initializer_range=0.2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    """One JSON a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def task_records(rng: random.Random, count: int) -> dict[str, list[dict[str, Any]]]:
    """`count` records of each of the nine tasks, in the form of the hub's data sets."""

    def text(words: int = 6) -> str:
        return sentence(rng, words)

    def choices(number: int) -> dict[str, list[str]]:
        return {"text": [text(3) for _ in range(number)], "label": list("ABCDE"[:number])}

    def question(name: str) -> dict[str, Any]:
        number = rng.choice((3, 4, 5))
        return {name: text(), "choices": choices(number), "answerKey": rng.choice("ABCDE"[:number])}

    def winogrande() -> dict[str, Any]:
        return {
            "sentence": "The cat and the dog sleeps because _ was old.",
            "option1": "cat",
            "option2": "dog",
            "answer": rng.choice("12"),
        }

    makers = {
        "hellaswag": lambda: {
            "activity_label": "River stone",
            "ctx_a": text(),
            "ctx_b": rng.choice(("the cat", "")),
            "endings": [text(4) for _ in range(4)],
            "label": str(rng.randrange(4)),
        },
        "lambada_openai": lambda: {"text": text(10)[:-1]},
        "boolq": lambda: {"passage": text(30), "question": text(5)[:-1].lower(), "label": rng.randrange(2)},
        "piqa": lambda: {"goal": text(), "sol1": text(4), "sol2": text(4), "label": rng.randrange(2)},
        "copa": lambda: {
            "premise": text(),
            "choice1": text(4),
            "choice2": text(4),
            "question": rng.choice(("cause", "effect")),
            "label": rng.randrange(2),
        },
        "winogrande": winogrande,
        "arc_challenge": lambda: question("question"),
        "arc_easy": lambda: question("question"),
        "openbookqa": lambda: question("question_stem"),
    }
    return {name: [make() for _ in range(count)] for name, make in makers.items()}
