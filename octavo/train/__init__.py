"""Training language models: a config in, metrics, checkpoints and figures out.

| file | what |
|---|---|
| `config` | frozen dataclasses, typed overrides, JSON |
| `presets` | runs as functions |
| `data`, `source` | batches of text; the checkpoint that a run begins from |
| `setup`, `schedule` | device, model, optimizer, learning rate |
| `trainer`, `signals` | the loop; what stops it |
| `checkpoint`, `checkpoint_folder` | tensors saved and loaded bit for bit; folders that are complete or absent |
| `resume`, `restore` | what a resumed run may change; a saved run as a model |
| `reports`, `ledger`, `metrics`, `progress` | what a run tells: numbers on the device, in files, on the terminal |
| `demo`, `plots` | BF16 beside FP8 |
"""

from octavo.settings import override
from octavo.train.config import TrainConfig
from octavo.train.presets import PRESETS, get_preset
from octavo.train.trainer import RunResult, Trainer

__all__ = ["PRESETS", "RunResult", "TrainConfig", "Trainer", "get_preset", "override"]
