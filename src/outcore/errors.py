"""Everything outcore raises on purpose, in one tree.

    OutcoreError
    +-- OptionError        (ValueError)  an option that does not exist
    +-- OptionValueError   (ValueError)  a value that an option cannot have
    |   +-- BudgetError                  the same, if the option is a budget
    +-- PolicyError        (ValueError)  an unknown policy, or a policy spec that is wrong
    +-- InfeasibleError    (RuntimeError) no plan meets the budget
    +-- VerifyError                      a noun broke one of its rules
    +-- ParseError         (ValueError)  a text form that cannot be read
    +-- FormatError        (ValueError)  a file that is not outcore's, or of another version
    +-- DigestError        (ValueError)  made for another trace, or a file edited since it was saved
    +-- SpillError         (OSError)     the spill directory: full, unwritable, or an I/O error
    +-- HostMemoryError    (RuntimeError) no host memory for what is offloaded
    +-- CaptureError                     a graph that cannot be planned (it then runs in-core)
    +-- StepError          (RuntimeError) a step that cannot go on: what backward reads is gone
    +-- WrapError          (ValueError)  a model that cannot be wrapped, or is not
    +-- NotEngagedError    (RuntimeError) strict, and something trained outside the budget
    +-- TargetError        (ValueError)  what is to be estimated cannot be found, made or traced
    +-- PhotographsError                 the demo's photographs cannot be read
    +-- MissingPackageError (ImportError) a package of an extra is not installed

Each is a dataclass: its fields are keyword arguments, and its message is built from them. A message
says what is wrong, the numbers with their units, where, and what to try. All can be pickled.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outcore.units import format_bytes, spell_size, spelled

LIKE_TORCH = " (CUDA out of memory. DefaultCPUAllocator: can't allocate memory)"
"""Words that finders of batch sizes look for in an error's arguments, to try a smaller batch: those
of Hugging Face Accelerate (and so its Trainer) and Lightning."""

OUTSIDE = "optimizer state, other models, kept results, gradients"
"""What else the process may hold."""

MUCH_DIVISOR = 10
"""The message of InfeasibleError mentions memory that is held anyway if it is at least the smallest
feasible budget divided by this."""


class OutcoreError(Exception):
    """The base of all errors of this package."""

    def __post_init__(self) -> None:
        """Build the message once all fields are set."""
        super().__init__(self._words())

    @property
    def message(self) -> str:
        """What is wrong, the numbers, where, and what to try."""
        raise NotImplementedError

    @property
    def _depends_on_batch(self) -> bool:
        """Whether a smaller batch may help."""
        return False

    def _words(self) -> str:
        return self.message + LIKE_TORCH * self._depends_on_batch

    def __str__(self) -> str:
        """Return the message for the current fields, which may change after it was raised."""
        return super().__str__() if type(self) is OutcoreError else self.message

    def __reduce__(self) -> tuple[Callable[..., "OutcoreError"], tuple[object, ...], object]:
        """Pickle by fields and notes; the default would call the class with the message alone."""
        return _blank, (type(self),), self.__dict__.copy()

    def __setstate__(self, state: dict[str, object] | None) -> None:
        """Undo `__reduce__`, past `__init__` so that no note is added twice."""
        self.__dict__.update(state or {})
        self.args = (self._words(),)


def _blank(kind: type[OutcoreError]) -> OutcoreError:
    return kind.__new__(kind)


@dataclass(kw_only=True, eq=False)
class OptionError(OutcoreError, ValueError):
    """An option that does not exist."""

    option: str
    """The name as given."""
    known: tuple[str, ...]
    """All valid names."""

    @property
    def message(self) -> str:
        """Name the option, the nearest known one and all known ones."""
        return f"unknown option {self.option!r}: {did_you_mean(self.option, self.known)}"


@dataclass(kw_only=True, eq=False)
class OptionValueError(OutcoreError, ValueError):
    """A value that an option cannot take."""

    option: str
    """The option's name."""
    value: object
    """The value as given."""
    reason: str
    """Why it is not valid, and what to write instead."""

    @property
    def message(self) -> str:
        """Name the option and the value, and say why it is not valid."""
        return f"option {self.option}={spelled(self.value)}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class BudgetError(OptionValueError):
    """A budget that is unreadable, negative, zero, missing, or above what a machine has."""


@dataclass(kw_only=True, eq=False)
class PolicyError(OutcoreError, ValueError):
    """An unknown policy, or a policy spec that is wrong."""

    policy: str
    """The policy's name or spec as given."""
    reason: str
    """What is wrong with it, and what would be valid."""

    @property
    def message(self) -> str:
        """Quote the spec and say what is wrong with it."""
        return f"policy {self.policy!r}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class InfeasibleError(OutcoreError, RuntimeError):
    """No plan meets the budget."""

    budget_bytes: int
    """The budget that was given."""
    floor_bytes: int
    """The smallest budget that some plan meets."""
    op: str
    """The op that needs the most memory, with its place in the model."""
    needed_bytes: int
    """What must be in the tier while that op runs."""
    tier: str = "device"
    """The tier whose budget is too small: device, host or disk."""
    policy: str = ""
    """The policy whose plans all need more; empty if no plan of any policy fits."""
    plan_file: str = ""
    """The file of the plan that needs more; empty if a policy makes plans."""
    at_least: bool = False
    """Whether the floor may turn out to be higher: it is not known yet what ops need in addition to
    their tensors, or what other graphs of the step need."""
    weights_bytes: int = 0
    """Parameters, module buffers and gradients of parameters, which do not depend on the batch."""

    @property
    def _depends_on_batch(self) -> bool:
        return self.weights_bytes < max(1, self.budget_bytes)

    @property
    def message(self) -> str:
        """Give the budget, the floor and the op that sets it, and advise a budget."""
        under = f" under policy {self.policy}" if self.policy else ""
        lean = self.policy.partition("{")[0] == "search"  # no other policy would do with less
        another = ", another policy" if self.policy and not lean else ""
        if self.plan_file:
            under, another = f" under the plan in {self.plan_file}", ", another plan"
        least = "at least " if self.at_least else ""
        others = self.floor_bytes - self.needed_bytes
        beside = f", plus {format_bytes(others)} held outside the graph ({OUTSIDE})"
        advice = f'try "{spell_size(self.floor_bytes)}" or more'
        if self.at_least:
            advice = (
                "the step may need more than measured so far, so try well above "
                f'"{spell_size(self.floor_bytes)}"'
            )
        smaller = ", or a smaller batch"
        if not self._depends_on_batch:
            smaller = (
                "; a smaller batch does not help: parameters, their gradients and module buffers "
                f"alone need {_both(self.weights_bytes)}"
            )
        return (
            f"no plan fits a {self.tier} budget of {_both(self.budget_bytes)}: "
            f"{self.op} needs {_both(self.needed_bytes)} at once{under}"
            f"{beside * (others * MUCH_DIVISOR >= self.floor_bytes)}, "
            f"and the smallest feasible budget is {least}{_both(self.floor_bytes)}; "
            f"{advice}{another}{smaller}"
        )


@dataclass(kw_only=True, eq=False)
class VerifyError(OutcoreError):
    """A noun broke one of its rules: a defect of the stage that made it, or of an edited file."""

    noun: str
    """What was verified: trace, plan, program, ..."""
    rule: str
    """The broken rule in its noun's words, such as "written before read"."""
    where: str
    """The offending element: "instruction 12", "buffer 3", ..."""
    detail: str = ""
    """What was found there."""
    excerpt: str = ""
    """The printed lines around the fault; attached to the error as a note."""

    def __post_init__(self) -> None:
        """Attach the excerpt as a note, below the message in a traceback."""
        super().__post_init__()
        if self.excerpt:
            self.add_note(self.excerpt)

    @property
    def message(self) -> str:
        """Name the noun, the rule and the place, and say what was found."""
        found = f": {self.detail}" if self.detail else ""
        return f'{self.noun} breaks the rule "{self.rule}" at {self.where}{found}'


@dataclass(kw_only=True, eq=False)
class ParseError(OutcoreError, ValueError):
    """A text form that cannot be read."""

    reason: str
    """What was expected, and what stands there."""
    line: int
    """Line number, from 1."""
    column: int
    """Column number, from 1."""
    text: str = ""
    """The line itself; shown with a caret under the column."""

    @property
    def message(self) -> str:
        """Give line, column and reason, and the line with a caret."""
        head = f"line {self.line}, column {self.column}: {self.reason}"
        return f"{head}\n{self.text}\n{' ' * (self.column - 1)}^" if self.text else head


@dataclass(kw_only=True, eq=False)
class FormatError(OutcoreError, ValueError):
    """A saved file that is not outcore's, or of a version that this release does not read."""

    noun: str
    """What the file was to hold: trace, plan, ..."""
    reason: str
    """What was found instead."""

    @property
    def message(self) -> str:
        """Say what was expected and what was found."""
        return f"not a readable {self.noun} file: {self.reason}"


@dataclass(kw_only=True, eq=False)
class DigestError(OutcoreError, ValueError):
    """A value made for another trace than the one at hand, or a file edited after it was saved."""

    noun: str
    """What it is: plan, program, ..."""
    made_for: str
    """The digest that it names; empty if it names none."""
    expected: str
    """Digest of what is at hand."""
    of: str = "trace"
    """What the digests identify, such as "trace"; "content": the file's own content."""
    file: str = ""
    """The file that it comes from, if known."""

    @property
    def message(self) -> str:
        """Give both digests and the file, and say how to get a value that fits."""
        named = self.made_for or "(none given)"
        if self.of == "content":
            which = f"the {self.noun} file {self.file}" if self.file else f"this {self.noun} file"
            return (
                f"{which} was changed after it was saved: "
                f"its header gives digest {named}, but its content has digest {self.expected}; "
                f"restore the file or make a new {self.noun}"
            )
        which = f"the {self.noun} in {self.file}" if self.file else f"this {self.noun}"
        reasons = {"hardware": "the machines differ", "profile": "times or memory differ"}
        why = reasons.get(self.of, "the model, its input shapes or the settings differ")
        return (
            f"{which} was made for {self.of} {named}, not for {self.expected}: "
            f"{why}; make a new {self.noun}"
        )


@dataclass(kw_only=True, eq=False)
class SpillError(OutcoreError, OSError):
    """The spill directory cannot be used: too little space, not writable, or an I/O error."""

    directory: str
    """The spill directory."""
    reason: str
    """What failed, in the operating system's words if there are any."""
    needed_bytes: int | None = None
    """What the plan has to write, if there is too little space."""
    free_bytes: int | None = None
    """What the file system has free, or `disk_budget` allows, if there is too little space."""
    budget_bytes: int | None = None
    """`disk_budget`, if there is too little space because of it."""

    @property
    def message(self) -> str:
        """Name the directory, the reason, and needed against free bytes where known."""
        free = "free"
        advice = "choose another with spill_dir or OUTCORE_SPILL_DIR, or raise the budget"
        if self.budget_bytes is not None:
            free = f"of {format_bytes(self.budget_bytes)} free"
            advice = "raise disk_budget, raise the budget, or keep fewer forward calls outstanding"
        numbers = ((self.needed_bytes, "needed"), (self.free_bytes, free))
        room = ", ".join(f"{format_bytes(n)} {what}" for n, what in numbers if n is not None)
        reason = f"{self.reason}: {room}" if room else self.reason
        return f"spill directory {self.directory!r}: {reason}; {advice}"


@dataclass(kw_only=True, eq=False)
class HostMemoryError(OutcoreError, RuntimeError):
    """There is no host memory for what is offloaded."""

    reason: str
    """What failed."""
    needed_bytes: int
    """What one more step has to put there."""
    taken_bytes: int = 0
    """What running steps and this process's plans have taken already."""
    budget_bytes: int | None = None
    """The most that may be taken."""

    @property
    def _depends_on_batch(self) -> bool:
        return True

    @property
    def message(self) -> str:
        """Say why, with needed, taken and allowed bytes."""
        allowed = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        return (
            f"no host memory: {self.reason}: {format_bytes(self.needed_bytes)} needed, "
            f"{format_bytes(self.taken_bytes)}{allowed} in use; raise host_budget, raise the "
            "device budget, or keep fewer forward calls outstanding"
        )


@dataclass(kw_only=True, eq=False)
class CaptureError(OutcoreError):
    """A graph that cannot be planned. It then runs in-core, unless `strict` is set."""

    reason: str
    """What about the graph cannot be planned."""
    site: str = ""
    """The op and its place in the model, if one op is the cause."""

    @property
    def message(self) -> str:
        """Say why, and where."""
        place = f" at {self.site}" if self.site else ""
        return f"cannot plan this graph: {self.reason}{place}"


@dataclass(kw_only=True, eq=False)
class StepError(OutcoreError, RuntimeError):
    """A step that cannot go on; plain PyTorch usually raises a RuntimeError here, too."""

    reason: str
    """What is wrong, and what to do instead."""

    @property
    def message(self) -> str:
        """The reason."""
        return self.reason


@dataclass(kw_only=True, eq=False)
class WrapError(OutcoreError, ValueError):
    """A model that cannot be wrapped, or that is not wrapped when its handle is requested."""

    model: str
    """The name of its class."""
    reason: str
    """Why not, and what to do instead."""

    @property
    def message(self) -> str:
        """Say which, and why."""
        return f"{self.model}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class NotEngagedError(OutcoreError, RuntimeError):
    """A training call brought no graph with a backward to plan, or not all of it was planned."""

    model: str
    """The name of the model's class."""
    reason: str = ""
    """What ran uncompiled, and why, if that is known."""

    @property
    def message(self) -> str:
        """Say what did not happen, and where to look."""
        if self.reason:
            return f"the budget does not cover all of {self.model}: {self.reason}"
        return (
            f"outcore found nothing to plan in {self.model}: it ran as plain PyTorch. "
            "torch.compile captured no graph that requires gradients. Wrap the module that your "
            "training loop calls, and check that its parameters require gradients. "
            "TORCH_LOGS=graph_breaks,recompiles shows what was not captured; check too that "
            "TORCHDYNAMO_DISABLE is not set"
        )


@dataclass(kw_only=True, eq=False)
class TargetError(OutcoreError, ValueError):
    """What is to be estimated cannot be found, made or traced."""

    target: str
    """As given: `script.py:function`."""
    reason: str
    """What is wrong."""
    where: str = ""
    """The line that it comes from, if one line is the cause."""
    advice: str = ""
    """What to try."""

    @property
    def message(self) -> str:
        """Say what is wrong, where, and what to try."""
        place = f", at {self.where}" if self.where else ""
        return f"{self.target}: {self.reason}{place}{f'; {self.advice}' if self.advice else ''}"


@dataclass(kw_only=True, eq=False)
class PhotographsError(OutcoreError):
    """The photographs cannot be read, because a package is missing."""

    reason: str
    """What failed, in Python's words."""

    @property
    def message(self) -> str:
        """Say why, and how to install what is missing."""
        return (
            f"no photographs to train on: {self.reason}; they come with scikit-learn and are "
            "decoded by pillow: pip install scikit-learn pillow"
        )


@dataclass(kw_only=True, eq=False)
class MissingPackageError(OutcoreError, ImportError):
    """A package that only some features need is not installed."""

    package: str
    """The package."""
    extra: str
    """The extra of outcore that installs it."""
    purpose: str
    """What needs it."""

    @property
    def message(self) -> str:
        """Say what is missing, for what, and how to install it."""
        return (
            f"{self.purpose}, and {self.package} is not installed: pip install {self.package} "
            f'(it belongs to the extra "{self.extra}")'
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to `word`, if one is near, and the list of all known names."""
    names = sorted(known)
    begun = [name for name in names if word and name.startswith(word)]
    nearest = begun or difflib.get_close_matches(word, names, n=1)
    question = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{question}Known: {', '.join(names) or 'none'}"


def _both(nbytes: int) -> str:
    """Print a size for reading, and also exactly in bytes if the first is rounded."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 2**10 else format_bytes(nbytes)
