"""Training on several GPUs: data parallelism with gradients that are stored, sent and summed in FP8.

`reducer` wraps a model; `buckets` and `layout` group gradients; `algorithms` sum them over `collectives`; `scales` and `autoscale`
decide the scales; `replicas` keeps models equal; `emulate` does all that on one device, for many ranks that are not there.
"""

from octavo.distributed.collectives import CollectiveError
from octavo.distributed.reducer import DataParallel

__all__ = ["CollectiveError", "DataParallel"]
