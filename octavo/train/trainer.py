"""The training loop: `Trainer(config).run()`.

One step: `micro_batches` forwards and backwards whose gradients add up (the loss divided by their number), the norm clipped,
AdamW. Nothing in it waits for the device. Losses, norms and the skip counter stay there until a log step reads all of them at
once. The optimizer skips a step with a non-finite gradient, and `max_skipped` of them in a row end the run.

The loop is the same whether it starts, resumes or is about to stop: SIGTERM and SIGINT let the current step finish, a
checkpoint is saved and `run` returns. 200 steps, and 100 steps, a new process and 100 more, give the same bits.

Under `torchrun` there is one such loop on each rank, over its own part of the data; gradients are averaged in backward
(`octavo.DataParallel`), so that all ranks take the same steps. Rank 0 alone writes metrics and prints; checkpoints are written by all,
and continue on any number of ranks.

Everything that a user can get wrong is checked by the constructor, before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.convert.break_even import named
from octavo.convert.layers import left_for_speed
from octavo.distributed import DataParallel
from octavo.distributed.launch import join
from octavo.memory import MemoryReport, memory_report
from octavo.optim import clip_grad_norm_
from octavo.settings import to_dict
from octavo.train import checkpoint, checkpoint_folder
from octavo.train.config import TrainConfig
from octavo.train.data import Batch, Data
from octavo.train.graph import build_graph
from octavo.train.ledger import StepLedger
from octavo.train.metrics import peak_of, read_metrics, smoothed_loss
from octavo.train.reports import Reports
from octavo.train.resume import meta_to_resume
from octavo.train.schedule import learning_rate
from octavo.train.setup import (
    build_model,
    build_optimizer,
    build_release,
    choose_device,
    deterministic,
    random_states,
    run_folder,
    set_random_states,
    versions,
)
from octavo.train.signals import StopRequest, stop_on_signal
from octavo.train.source import SOURCE, open_source, save_source


@dataclass(frozen=True)
class RunResult:
    """What `Trainer.run` did."""

    step: int
    stopped_by: str | None
    """Name of the signal that ended the run early, or None."""
    train_loss: float
    """Mean training loss of the last tenth of the steps, nats per token."""
    val_loss: float | None
    """Loss on held-out documents after the last step; None if the run was stopped before it."""
    tokens_per_s: float
    """Median over the log steps, the first left out; NaN with fewer than two."""
    memory: MemoryReport | None
    """Bytes by kind, at the last log step."""
    checkpoint: Path | None
    """The newest checkpoint."""


class Trainer:
    """A run of `config`, from its beginning or, with `resume`, from its newest checkpoint if there is one.

    With `replace`, `run` removes what the folder holds before it begins. Raises `ValueError` when the folder already holds a run
    and neither is set or is a file, when the checkpoint is damaged, belongs to another recipe, model or data or is past the last
    step, and when the text is missing, binary or too short.
    """

    def __init__(self, config: TrainConfig, *, resume: bool = False, replace: bool = False) -> None:
        self.config = config
        self.place = join(config.device, config.train.timeout)
        self.folder = run_folder(config.out)
        self.step = 0
        self._checkpoints = self.folder / checkpoint_folder.FOLDER
        self._replace = replace
        found = None if replace else checkpoint_folder.latest(self._checkpoints)
        if found is not None and not resume:
            raise ValueError(
                f"{config.out} already holds a run ({found.name}): pass --resume to continue it, or --set out=… for a new one"
            )
        self.device = choose_device(config.device)
        with self.place.first_goes_first():
            self._source = open_source(config, self.folder, resumed=found is not None)
            self.data = Data(
                config.data, config.seed, self.device, self._source, rank=self.place.rank, world=self.place.world
            )
        self._settings = to_dict(config)
        self._settings["data"]["fingerprint"] = self.data.fingerprint
        meta = {} if found is None else meta_to_resume(found, self._settings)
        left = config.train.steps - meta.get("step", 0)
        self.data.check_length(left * config.train.micro_batches, meta.get("stream", {}).get("position", 0))
        torch.manual_seed(config.seed)
        rule = config.break_even if found is None else checkpoint_folder.layers_left(meta)
        self.model = build_model(config, self.data.vocab_size, self.device, self._source, found is not None, rule)
        self._left = left_for_speed(self.model)
        self.optimizer = build_optimizer(config, self.model)
        self.parallel = DataParallel(
            self.model,
            recipe=config.recipe,
            node_size=self.place.node_size,
            check_every=config.train.check_every,
            timeout=config.train.timeout,
        )
        if self.place.rank:
            torch.manual_seed(config.seed + self.place.rank)  # dropout differs between the ranks
        self._release = build_release(config, self.model, self.optimizer, self.place.world)
        self._graph = build_graph(config, self.device, self._forward_backward, self.parallel)
        if found is not None:
            self._load(found, meta)
        if config.train.compile:
            self.model.compile_blocks()
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        peak = peak_of(name)
        self._reports = Reports(
            config,
            self.folder,
            self.model,
            self.parallel,
            self.place,
            StepLedger(meta.get("skipped", 0), meta.get("in_a_row", 0), self.place.mean),
            step=self.step,
            tokens=meta.get("tokens", self.step * config.tokens_per_step),
            flops=self.model.flops_per_token(config.data.seq_len),
            peak=peak,
        )
        self._info = {
            "config": self._settings,
            "versions": versions(),
            "device": name,
            "ranks": self.place.world,
            "peak": peak and vars(peak),
        }
        self._val_loss: float | None = None

    def run(self) -> RunResult:
        """Train to the last step, or to the end of the current one when SIGTERM or SIGINT arrives; then save.

        Raises `NumericsError` after `optim.max_skipped` skipped steps in a row and `checkpoint.CheckpointError` when the last
        checkpoint cannot be written; one that fails on the way is reported and training goes on.
        """
        config, reports = self.config, self._reports
        self.place.on_first(self._prepare_folder)
        closing = contextlib.nullcontext() if self._graph is None else contextlib.closing(self._graph)
        with closing, reports.open(), deterministic(config.train.deterministic), stop_on_signal() as stop:
            if self._left:
                reports.note(
                    f"FP8 is slower for layers {named(self._left)}: they stay as they are (model.break_even=none converts them)"
                )
            self._loop(stop)
            if self.step == config.train.steps:
                self._validate()
            self._save()
            stopped_by = stop.signal
            if self.step < config.train.steps:
                stopped_by = stopped_by or "a signal to another rank"
                reports.note(f"stopped by {stopped_by} after step {self.step}; continue with --resume")
        self.place.leave()
        return RunResult(
            step=self.step,
            stopped_by=stopped_by,
            train_loss=smoothed_loss(read_metrics(reports.path)) if self.place.is_first else math.nan,
            val_loss=self._val_loss,
            tokens_per_s=reports.tokens_per_s,
            memory=reports.memory,
            checkpoint=checkpoint_folder.latest(self._checkpoints),
        )

    def _prepare_folder(self) -> None:
        if self._replace:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.remove_leftovers(self._checkpoints)
        save_source(self.folder / SOURCE, self._source, self.data.tokenizer)
        (self.folder / "run.json").write_text(json.dumps(self._info, indent=1) + "\n")

    def _loop(self, stop: StopRequest) -> None:
        config = self.config
        while self.step < config.train.steps and not self.place.any_so_far(bool(stop)):
            self._train_step()
            self._reports.advance(self.step)
            last = self.step == config.train.steps
            if last or _due(self.step, config.log.every):
                self._reports.log_step(self.device, self.data.epochs)
            if not last and _due(self.step, config.train.eval_every):
                self._validate()
            if not last and _due(self.step, config.checkpoint.every):
                try:
                    self._save()
                except checkpoint.CheckpointError as error:
                    self._reports.note(f"warning: {error}; training goes on")

    def _train_step(self) -> None:
        config = self.config
        self.step += 1
        lr = learning_rate(self.step, config.train.steps, config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        batches = (self.data.next_batch() for _ in range(config.train.micro_batches))
        count = config.recipe.converts and _due(self.step, config.log.stats_every)
        with self._reports.counting() if count else contextlib.nullcontext():
            if self._release is not None:
                loss = self.parallel(*next(batches))
                norm, losses = self._release.step(loss), loss.detach()
            elif self._graph is None or count:
                losses = self._forward_backward(batches)
            else:
                losses = self._graph(list(batches))
        if self._release is None:
            norm = clip_grad_norm_(
                self.model.parameters(), math.inf if config.optim.clip is None else config.optim.clip
            )
        if _due(self.step, config.log.every):
            # Before the optimizer's step, which drops the cached weight codes: all that a step needs is alive here.
            self._reports.memory = memory_report(self.model, self.optimizer)
        if self._release is None:
            self.optimizer.step()
        self._reports.ledger.add(self.step, lr, losses.sum(), norm, self.optimizer.skipped_steps)

    def _forward_backward(self, batches: Iterable[Batch]) -> Tensor:
        """Gradients of the mean over all micro-batches of a step; their losses, divided by their number, FP32 [micro_batches]."""
        count, losses = self.config.train.micro_batches, []
        for number, batch in enumerate(batches, 1):
            with contextlib.nullcontext() if number == count else self.parallel.no_sync():
                loss = self.parallel(*batch) / count
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss of the model, as it is now, over the validation batches."""
        self.model.eval()
        losses = [self.model(*batch).detach() for batch in self.data.validation(self.config.train.eval_batches)]
        self.model.train()
        return torch.stack(losses).mean().item()

    def _validate(self) -> None:
        with self._reports.off_the_clock():
            self._val_loss = self.validation_loss()
            self._reports.validated(self.step, self._val_loss)

    def _save(self) -> None:
        newest = checkpoint_folder.latest(self._checkpoints)
        if self.place.share(newest is not None and newest.name == checkpoint_folder.name_of(self.step)):
            return
        with self._reports.off_the_clock():
            meta = {
                "step": self.step,
                "config": self._settings,
                "versions": versions(),
                checkpoint_folder.LEFT: self._left,
                "stream": self.data.state_dict(),
                "skipped": self._reports.ledger.skipped,
                "in_a_row": self._reports.ledger.in_a_row,
                "tokens": self._reports.tokens_at(self.step),
            }
            tensors = {**checkpoint.plain_tensors(self.model, self.optimizer), **self._extra_tensors()}
            checkpoint.save(self._checkpoints, self.step, tensors, meta, self.config.checkpoint.keep, self.place)

    def _extra_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint may lack: random states of this rank, µ of gradients."""
        mu = {f"reduction/{name}": value.clone() for name, value in self.parallel.scaling_state_dict().items()}
        return {**random_states(self.device, self.place.rank), **mu}

    def _load(self, path: Path, meta: dict[str, Any]) -> None:
        extra = self._extra_tensors()
        checkpoint.load(path, self.model, self.optimizer, extra)
        set_random_states({name: state for name, state in extra.items() if name.startswith("random/")}, self.device)
        self.parallel.load_scaling_state_dict(
            {name.removeprefix("reduction/"): value for name, value in extra.items() if name.startswith("reduction/")}
        )
        self.data.load_state_dict(meta["stream"])
        self.step = meta["step"]


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
