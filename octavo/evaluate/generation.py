"""Text generated up to a stop string, greedy or sampled.

A transformers model generates with its own `generate`, prompts padded on the left and masked. octavo's decoder has no mask for
padding and no cache, so prompts of equal length share a batch and each token is a forward over the last window. Either way a
row ends at the end-of-text token, at a stop string or after `max_tokens`, and the text is cut before the first stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.evaluate.models import LoadedModel

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which tasks call the most tokens to generate; the first that is there counts."""
OWN_SETTINGS = ("top_k", "top_p")
"""Settings of sampling, beside the temperature, that octavo's own decoder knows."""


@dataclass(frozen=True)
class Sampling:
    """How to generate."""

    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    """0 takes the most probable token."""
    others: tuple[tuple[str, Any], ...] = ()
    """Further settings, such as top_p, by name."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], max_tokens: int, eos: str) -> Sampling:
        """From the `generation_kwargs` of a task, where `max_tokens` is the default and `eos` the spelling of the end of text."""
        rest = dict(settings)
        until = rest.pop("until", None) or []
        stop = [until] if isinstance(until, str) else list(until)
        limits = [rest.pop(name, None) for name in LIMITS]
        limit = next((limit for limit in limits if limit is not None), max_tokens)
        do_sample, temperature = rest.pop("do_sample", None), rest.pop("temperature", None)
        if do_sample is None:
            do_sample = bool(temperature)
        temperature = float(temperature or 1.0) if do_sample else 0.0
        if int(limit) < 1 or temperature < 0:
            raise ValueError(f"generation asks for {limit} tokens at temperature {temperature}: both must be positive")
        stop += [eos] if eos and eos not in stop else []
        return cls(int(limit), tuple(s for s in stop if s), temperature, tuple(sorted(rest.items())))

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        for stop in self.stop:
            text = text.split(stop)[0]
        return text


def generate(loaded: LoadedModel, contexts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[tuple[int, str]]:
    """(number of the context, generated text) for each of `contexts`, which are not empty and leave room in the window.

    Raises `ValueError` for settings that the model's own sampling does not know.
    """
    one_length = loaded.is_decoder
    if one_length:
        unknown = [name for name, _ in sampling.others if name not in OWN_SETTINGS]
        if unknown:
            raise ValueError(
                f"generation with {', '.join(unknown)} is not there: use temperature, {', '.join(OWN_SETTINGS)}"
            )
    run = _run_octavo if one_length else _run_transformers
    order = sorted(range(len(contexts)), key=lambda number: (-len(contexts[number]), number))
    start = 0
    while start < len(order):
        length = len(contexts[order[start]])
        most = max(1, loaded.scorer.batch_tokens // (length + sampling.max_tokens))
        batch = [n for n in order[start : start + most] if not one_length or len(contexts[n]) == length]
        rows = run(loaded, [contexts[number] for number in batch], sampling)
        for number, row in zip(batch, rows, strict=True):
            yield number, sampling.cut(loaded.codec.decode(row))
        start += len(batch)


def _stopped(loaded: LoadedModel, sampling: Sampling) -> Callable[[Sequence[int]], bool]:
    def stopped(new: Sequence[int]) -> bool:
        if new and new[-1] == loaded.codec.eos:
            return True
        text = loaded.codec.decode(new)
        return any(stop in text for stop in sampling.stop)

    return stopped


@torch.no_grad()
def _run_transformers(loaded: LoadedModel, contexts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    from transformers import StoppingCriteria, StoppingCriteriaList

    width = max(map(len, contexts))
    device, eos = loaded.scorer.device, loaded.codec.eos
    tokens = torch.full((len(contexts), width), eos)
    mask = torch.zeros_like(tokens)
    for row, context in enumerate(contexts):
        tokens[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    stopped = _stopped(loaded, sampling)

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.tensor([stopped(row[width:]) for row in input_ids.tolist()], device=input_ids.device)

    options: dict[str, Any] = {"do_sample": sampling.temperature > 0, **dict(sampling.others)}
    if sampling.temperature > 0:
        options["temperature"] = sampling.temperature
    output = loaded.model.generate(  # type: ignore[operator]
        input_ids=tokens.to(device),
        attention_mask=mask.to(device),
        max_length=width + sampling.max_tokens,
        stopping_criteria=StoppingCriteriaList([Stop()]),
        pad_token_id=eos,
        **options,
    )
    return [row[width:] for row in output.tolist()]


def _run_octavo(loaded: LoadedModel, contexts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    tokens = torch.tensor([list(context) for context in contexts], device=loaded.scorer.device)
    start, stopped = tokens.shape[1], _stopped(loaded, sampling)
    rows: list[list[int]] = [[] for _ in contexts]
    done = [False] * len(rows)
    while not all(done) and tokens.shape[1] - start < sampling.max_tokens:
        logits = loaded.scorer.logits(tokens[:, -loaded.scorer.window :])[:, -1].float()
        following = _choose(logits, sampling)
        tokens = torch.cat((tokens, following), dim=1)
        for number, token in enumerate(following[:, 0].tolist()):
            if not done[number]:
                rows[number].append(token)
                done[number] = stopped(rows[number])
    return rows


def _choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each row [B, 1] from logits [B, V]: the most probable one, or a draw from the kept part."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    settings = dict(sampling.others)
    values, tokens = (logits / sampling.temperature).sort(dim=-1, descending=True)
    probabilities = values.softmax(dim=-1)
    if settings.get("top_k"):
        probabilities[:, int(settings["top_k"]) :] = 0
    if settings.get("top_p") is not None:
        # The smallest set of the most probable tokens that reaches top_p: those before which less than that has passed.
        probabilities[(probabilities.cumsum(dim=-1) - probabilities) >= float(settings["top_p"])] = 0
    return tokens.gather(1, torch.multinomial(probabilities, 1))
