"""The text form of every noun: printed for reading, parsed for tests and edited files.

The grammar is in docs/ir.md. `parse(to_text(noun), type(noun)) == noun`, floats to the last bit.
"""

from outcore.ir.text.parser import parse
from outcore.ir.text.printer import instruction_text, op_text, to_text

__all__ = ["instruction_text", "op_text", "parse", "to_text"]
