"""A GPU that is not there, for torch built for CUDA: its real allocator, streams and events.

What it proves: that the code for CUDA runs, that copies and kernels are ordered by what is waited
for, and that memory is taken and given back as planned. What it cannot: speed, and the bits of
CUDA's kernels.
"""
