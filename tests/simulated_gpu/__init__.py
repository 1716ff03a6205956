"""simulated_gpu: stand in for a GPU, so that torch built for CUDA runs with its real allocator.

Streams and events work too. Tests with it show that the CUDA code runs, that waits put copies and
kernels in order, and that memory is allocated and freed as planned. They show nothing about speed
or the bits of CUDA's kernels.
"""
