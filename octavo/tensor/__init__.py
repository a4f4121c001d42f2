"""`ScaledTensor`: low-precision codes and a scale behind the interface of a tensor.

`storage` holds the codes and re-quantises them; `scaled_tensor` is the tensor; `dispatch` says what operations do to it, `operators` what
those do that are known one by one.
"""

from octavo.tensor.scaled_tensor import ScaledTensor, cast, uncast

__all__ = ["ScaledTensor", "cast", "uncast"]
