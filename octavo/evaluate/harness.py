"""A model as lm-evaluation-harness's `LM`, with the tokens of the harness's own `hf` model.

    from octavo.evaluate.harness import HarnessLM
    lm_eval.simple_evaluate(HarnessLM(load_model("runs/mine")), tasks=["wikitext"])

What is equal to `hf` in every request: which special tokens a string gets, the blanks that move from the context to the
continuation, the prefix token before an empty context, truncation on the left, rolling windows, stop strings. What is not: the
softmax is FP32 for a BF16 model too (`hf` with softmax_dtype=float32), a batch is a number of tokens instead of rows, and a
continuation longer than the window is scored in rolling windows where `hf` fails.

This module imports lm_eval, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from octavo.evaluate.generation import Sampling, generate
from octavo.evaluate.models import LoadedModel
from octavo.evaluate.scoring import Pair

MAX_GENERATED = 256
"""Tokens to generate where a task does not say."""


class HarnessLM(TemplateLM):
    """`loaded` for the harness. `add_bos` puts the special tokens of the tokenizer before each text, or leaves them out; None
    leaves it to the tokenizer. `advance(done, total)` is called as requests are finished."""

    def __init__(
        self,
        loaded: LoadedModel,
        add_bos: bool | None = None,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        super().__init__()
        self._loaded, self._codec, self._scorer = loaded, loaded.codec, loaded.scorer
        self._add_bos, self._advance = add_bos, advance
        self._device = self._scorer.device

    @property
    def eot_token_id(self) -> int:
        return self._codec.eos

    @property
    def prefix_token_id(self) -> int:
        return self._codec.eos if self._codec.bos is None else self._codec.bos

    @property
    def max_length(self) -> int:
        """The window, in tokens."""
        return self._scorer.window

    @property
    def max_gen_toks(self) -> int:
        return MAX_GENERATED

    @property
    def tokenizer_name(self) -> str:
        return self._codec.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of `string`; a text that begins with the prefix token's own spelling gets no special tokens."""
        if add_special_tokens is None:
            prefix = self._codec.decode([self.prefix_token_id], skip_special=False)
            add_special_tokens = False if prefix and string.startswith(prefix) else self._add_bos
        return self._codec.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the greedy one) of each request."""
        for request in requests:
            if not request.args[1]:
                raise ValueError(
                    f"a request of {request.task_name or 'a task'} has an empty continuation: {request.args}"
                )
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs: list[Pair] = []
        parts: list[int] = []
        for text, context, continuation in requests:
            if not continuation:
                raise ValueError(
                    f"the continuation of {text!r:.200} has no token of its own: the tokenizer joins it to the context"
                )
            windows = [(context, continuation)]
            if len(continuation) > self.max_length:
                windows = list(self._windows(continuation, context[-1]))
            pairs += windows
            parts.append(len(windows))
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._advance(done, len(pairs))

        scores = iter(self._scorer.score(pairs, advance))
        answers: list[tuple[float, bool]] = []
        for (text, _context, _continuation), count in zip(requests, parts, strict=True):
            own = [next(scores) for _ in range(count)]
            answers.append((sum(score.logprob for score in own), all(score.greedy for score in own)))
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answers[-1])
        return answers

    def _windows(self, tokens: list[int], prefix: int) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=tokens, prefix_token=prefix, max_seq_len=self.max_length, context_len=1
        )
        return map(make_disjoint_window, windows)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of each text, every token predicted once; 0 for a text without tokens."""
        windows = [list(self._windows(self.tok_encode(request.args[0]), self.prefix_token_id)) for request in requests]
        flat = [(None, *window) for own in windows for window in own]
        scores = iter(self._loglikelihood_tokens(flat))
        totals = []
        for request, own in zip(requests, windows, strict=True):
            totals.append(float(sum(next(scores)[0] for _ in own)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """A text for each (context, settings): greedy, or sampled as the settings ask, up to the first stop string."""
        answers: dict[int, str] = {}
        groups: dict[Sampling, list[int]] = {}
        eos = self._codec.decode([self._codec.eos], skip_special=False)
        for number, request in enumerate(requests):
            groups.setdefault(Sampling.of(request.args[1], MAX_GENERATED, eos), []).append(number)
        for sampling, numbers in groups.items():
            room = self.max_length - sampling.max_tokens
            if room < 1:
                raise ValueError(
                    f"a task asks for {sampling.max_tokens} generated tokens, and the window holds {self.max_length} with the "
                    "context: use a larger --window, or a task with a smaller max_gen_toks"
                )
            contexts = [self._prompt(requests[number].args[0])[-room:] for number in numbers]
            for place, text in generate(self._loaded, contexts, sampling):
                number = numbers[place]
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                self._advance(len(answers), len(requests))
        return [answers[number] for number in range(len(requests))]

    def _prompt(self, text: str) -> list[int]:
        """The ids of a prompt: here it is the beginning-of-text token alone that keeps special tokens away."""
        bos = None if self._codec.bos is None else self._codec.decode([self._codec.bos], skip_special=False)
        special = False if bos and text.startswith(bos) else self._add_bos
        return self._codec.encode(text, special) or [self.prefix_token_id]
