"""Triton kernels for NVIDIA GPUs, one operation a file: kernel, launcher, bound.

`ops.TritonOps` is what a decoder layer calls; transfers call `block_copy` directly. Import the
modules by name and only for a CUDA device: each needs `triton`, this file does not, and none
looks for a GPU. With `TRITON_INTERPRET=1` set before `triton` is imported everything runs on
CPU tensors, slowly, in fp32 and fp16 (the interpreter's `tl.dot` is wrong in bf16).

Launchers take what lies on the device, allocate only outputs and scratch, and read nothing back,
so that they can be captured into a CUDA graph. Masked loads always say what they give instead:
memory outside of the rows, a hole of a block table, a slot behind the context is never read.
Numbers that change from step to step are not specialised on: nothing compiles anew for them.
"""
