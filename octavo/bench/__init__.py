"""`octavo bench`: how fast and how large octavo is on this machine, beside its peers in the same process.

    kernels      each kernel of octavo, and the GEMMs: time, bytes, share of the floor
    linear       one linear layer, forward and backward
    block        a few blocks and the head, forward and backward
    step         a training step with clipping and the optimizer
    optimizer    the step of AdamW alone

Rules for every number: the same inputs for all variants; what is timed is checked, on these inputs, against a stated bound; medians with
the smallest and largest of at least ten repeats, after warm-up; peers that are not installed are rows that say so. What this costs:
one process holds one variant at a time, so that none sees another's memory, but all share the compiler's state and the clock of the GPU.
"""
