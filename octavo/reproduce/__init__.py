"""Experiments of FP8-LM (arXiv 2310.18313) as commands, each with the paper's claim beside what is measured.

| file | what |
|---|---|
| `gradients` | the gradients of many data-parallel ranks, on one device, in bounded memory |
| `fig7` | Figure 7: what a sum of FP8 gradients loses, by block, strategy and algorithm |
| `sensitivity` | the loss of training over the threshold and the period of auto-scaling |
| `figures` | their plots |
| `entry` | `octavo reproduce …` |
"""
