"""spec: allocators as text: `best-fit`, `virtual-chunks{chunk_bytes=40MiB}` (`outcore/spec.py`)."""

from __future__ import annotations

from outcore.allocators.allocator import Allocator
from outcore.allocators.table import ALLOCATORS
from outcore.errors import OptionValueError
from outcore.spec import SpecParser


def _wrong(spec: str, reason: str) -> OptionValueError:
    return OptionValueError(option="allocator", value=spec, reason=reason)


_PARSER: SpecParser[Allocator] = SpecParser(
    "allocator", "virtual-chunks{chunk_bytes=40MiB}", ALLOCATORS, _wrong
)


def resolve(allocator: str | Allocator) -> Allocator:
    """The allocator itself, or the one that a spec describes.

    Raises OptionValueError for text of another form, for an unknown name or option (with the
    nearest known one), and for an invalid value of an option.
    """
    return _PARSER.parse(allocator) if isinstance(allocator, str) else allocator
