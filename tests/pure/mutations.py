"""mutations: put faults into programs on purpose: a missing instruction or hazard edge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outcore.errors import VerifyError
from outcore.interpret import Chooser, in_order, interpret
from outcore.ir.problem import Problem
from outcore.ir.program import Instruction, Program
from outcore.ir.trace import Trace
from outcore.ir.verify_program import verify_program
from tests.pure import meaning


def without_instruction(program: Program) -> Iterator[Program]:
    """The program without one instruction, for each one; those after it inherit its edges."""
    for lost in range(len(program.body)):
        body = tuple(
            replace(x, after=_moved(program, x.after, lost), pace=_moved(program, x.pace, lost))
            for i, x in enumerate(program.body)
            if i != lost
        )
        yield replace(program, body=body, boundary=program.boundary - (lost < program.boundary))


def _moved(program: Program, edges: tuple[int, ...], lost: int) -> tuple[int, ...]:
    handed_on = program.body[lost].after if lost in edges else ()
    kept = {*(e for e in edges if e != lost), *handed_on}
    return tuple(sorted(e - (e > lost) for e in kept))


def without_edge(program: Program) -> Iterator[Program]:
    """The program without one hazard edge, for each one."""
    for position, instruction in enumerate(program.body):
        for edge in instruction.after:
            kept = tuple(e for e in instruction.after if e != edge)
            yield replace(program, body=_with(program, position, replace(instruction, after=kept)))


def _with(program: Program, position: int, new: Instruction) -> tuple[Instruction, ...]:
    return (*program.body[:position], new, *program.body[position + 1 :])


def caught(problem: Problem, program: Program) -> bool:
    """Whether the verifier refuses `program`."""
    try:
        verify_program(problem, program)
    except VerifyError:
        return True
    return False


def changes_results(trace: Trace, right: dict[int, int], bad: Program, tries: int = 30) -> bool:
    """Whether an order that the bad program allows gives results other than `right`."""
    dice = random.Random(0)
    choosers: list[Chooser] = [max, min, *([lambda ready: dice.choice(list(ready))] * tries)]
    return any(_results(trace, bad, choose) != right for choose in choosers)


def _results(trace: Trace, program: Program, choose: Chooser) -> dict[int, int]:
    arrays = interpret(trace, program, meaning.given(program), meaning.semantics(trace), choose)
    return {b: arrays[b] for b in meaning.results_of(trace)}


@dataclass
class Tally:
    """Counts of faults: tried, refused by the verifier, harmful, and harmful but not refused."""

    instructions: int = 0
    instructions_caught: int = 0
    edges: int = 0
    edges_caught: int = 0
    edges_harmful: int = 0
    edges_harmful_missed: int = 0

    def add(self, problem: Problem, program: Program) -> None:
        """Try every single fault of `program`."""
        for bad in without_instruction(program):
            self.instructions += 1
            self.instructions_caught += caught(problem, bad)
        right = _results(problem.trace, program, in_order)
        for bad in without_edge(program):
            refused = caught(problem, bad)
            harmful = changes_results(problem.trace, right, bad)
            self.edges += 1
            self.edges_caught += refused
            self.edges_harmful += harmful
            self.edges_harmful_missed += harmful and not refused
