"""advice: suggest what to try if a step cannot be traced."""

from __future__ import annotations

from torch._subclasses.fake_tensor import UnsupportedOperatorException

from outcore.errors import OutcoreError
from outcore.preflight.step import NEEDS_NUMBERS

NUMBERS = (
    "a step is estimated without running it: move code that reads tensor values out of the step. "
    "In training, torch.compile splits such a step, and outcore plans the parts"
)
ON_CPU = "make the model and its inputs on the CPU: --hardware names the machine"
FAKE = "describe what the op returns, with torch.library.register_fake"
SPARSE = (
    "a step with sparse tensors cannot be estimated. In training, outcore plans the parts around "
    "them"
)
IN_CORE = "in training, outcore runs in-core what it cannot plan"
PLAIN = "the step itself raises this: check that it runs in plain PyTorch with the returned inputs"

SAID = {
    "data pointer": NUMBERS,
    "fake impl": FAKE,
    "access storage of Sparse": SPARSE,
    "support for cuda": ON_CPU,
    "not compiled with CUDA": ON_CPU,
    "no NVIDIA driver": ON_CPU,
    "No CUDA GPUs are available": ON_CPU,
}
"""Map parts of the messages of torch's errors, which have no classes of their own, to advice."""


def advice_for(error: BaseException) -> str:
    """What helps against an error that a step raised while it was traced."""
    if isinstance(error, NEEDS_NUMBERS):
        return NUMBERS
    if isinstance(error, UnsupportedOperatorException):
        return FAKE
    if isinstance(error, OutcoreError):
        return IN_CORE
    return next((advice for said, advice in SAID.items() if said in str(error)), PLAIN)
