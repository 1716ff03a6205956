"""Train PyTorch networks that do not fit in device memory."""

__version__ = "0.1.0"
