"""The `octavo` command.

    octavo train PRESET [--set path=value]… [--resume]    train a preset with changes
    octavo demo [--set path=value]… [--seed N]            BF16 beside FP8 on this machine, with two figures
    octavo eval MODEL… --tasks FOLDER|hub                 zero-shot scores, perplexity, held-out loss; --compare for results
    octavo export RUN OUT [--format fp8]                  a run as a Hugging Face checkpoint
    octavo plan PRESET [--set path=value]… [--gpu h200]   bytes by kind, the peak, what fits and the time of a step
    octavo presets                                        list the presets
    octavo prepare CONFIG [--set path=value]…             a corpus from sources: filters, no copies, token shards, a report
    octavo reproduce fig7|sensitivity|mu                  experiments of the paper, its claims beside what is measured
    octavo bench [kernels|linear|block|step|optimizer]    time and memory here, beside BF16 and other libraries
    octavo doctor                                         what this machine can do

Exit codes: 0 done, or stopped by SIGTERM or SIGINT after a checkpoint; 1 the run failed (arithmetic, disk); 2 the user asked for
something that cannot be, said in one sentence before anything is written. A traceback is a defect of octavo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from octavo.cli.arguments import parser
from octavo.cli.commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        code = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has what it wanted, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
