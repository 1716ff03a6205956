"""errors: the messages, fields, copies and class tree of all errors."""

import copy
import errno
import inspect
import pickle
import re
import traceback

import pytest

from outcore import errors
from outcore.errors import (
    BudgetError,
    CaptureError,
    DigestError,
    FormatError,
    HostMemoryError,
    InfeasibleError,
    MissingPackageError,
    NotEngagedError,
    OptionError,
    OptionValueError,
    OutcoreError,
    PhotographsError,
    SpillError,
    StepError,
    TargetError,
    WrapError,
    did_you_mean,
)
from outcore.ir.plan import KEEP_ALL
from outcore.ir.text import parse, to_text
from outcore.ir.trace import Trace
from outcore.ir.verify_program import verify_program
from outcore.lower import lower
from outcore.planfile.store import VERSION
from outcore.policies import resolve
from outcore.units import parse_rate, parse_size
from tests.pure.building import dense_problem
from tests.pure.mutations import without_instruction

PROBLEM = dense_problem(2)
KEPT = lower(PROBLEM, KEEP_ALL)


def raised(call, *args):
    """The error that a call raises, so that the examples have the messages that users see."""
    with pytest.raises((OutcoreError, ValueError)) as caught:
        call(*args)
    return caught.value


EXAMPLES = (
    OptionError(option="buget", known=("budget", "policy")),
    OptionValueError(option="link_limit", value="fast", reason=str(raised(parse_rate, "fast"))),
    BudgetError(option="budget", value="16G", reason=str(raised(parse_size, "16G", None))),
    raised(resolve, "pooch{x=1}"),
    InfeasibleError(
        budget_bytes=2**30,
        floor_bytes=1_539_316_279,
        op="op 112 aten.convolution.default at layers.3.conv2 (model.py:41)",
        needed_bytes=1_500_000_000,
    ),
    raised(verify_program, PROBLEM, next(without_instruction(KEPT))),
    raised(parse, to_text(PROBLEM.trace).replace("buffer", "buffet", 1), Trace),
    FormatError(noun="plan", reason=f"plan.json has version 9, this release reads {VERSION}"),
    DigestError(noun="plan", made_for="aa11", expected="bb22"),
    SpillError(
        directory="/scratch", reason="too little room", needed_bytes=3 * 2**30, free_bytes=2**20
    ),
    HostMemoryError(
        reason="host_budget is used up",
        needed_bytes=2**30,
        taken_bytes=3 * 2**29,
        budget_bytes=2**31,
    ),
    CaptureError(reason="in-place op aten.add_.Tensor", site="norm (model.py:7)"),
    StepError(
        reason="backward through a graph whose saved data was freed: an earlier backward call "
        "ran without retain_graph=True, or a hook on a saved tensor replaced it"
    ),
    WrapError(model="Net", reason="neither it nor a module inside it is wrapped"),
    NotEngagedError(model="Net"),
    TargetError(
        target="train.py:step",
        reason="the step cannot be traced: the code reads tensor values, which do not exist during "
        "tracing",
        where="train.py:12: x.item()",
        advice="a step is estimated without running it: move code that reads tensor values out of "
        "the step",
    ),
    PhotographsError(reason="No module named 'sklearn'"),
    MissingPackageError(package="scipy", extra="plan", purpose="the lower bound needs a solver"),
)
by_name = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def classes():
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_every_class_has_an_example():
    assert {type(error).__name__ for error in EXAMPLES} | {"OutcoreError"} == set(classes())


def test_the_tree_at_the_top_of_the_file_is_the_tree():
    drawn = {}
    ancestors = {0: "OutcoreError"}
    for line in errors.__doc__.splitlines():
        if branch := re.match(
            r"    (?P<indent>[ |]*)\+-- (?P<name>\w+) +(\((?P<also>\w+)\))?", line
        ):
            depth = len(branch["indent"]) // 4 + 1
            ancestors[depth] = branch["name"]
            drawn[branch["name"]] = (ancestors[depth - 1], branch["also"])
    found = {
        name: (
            kind.__bases__[0].__name__,
            kind.__bases__[1].__name__ if kind.__bases__[1:] else None,
        )
        for name, kind in classes().items()
        if kind is not OutcoreError
    }
    assert drawn == found


@by_name
def test_an_error_says_what_its_fields_say(error, golden):
    printed = "".join(traceback.format_exception_only(error))
    golden(printed, f"errors/{type(error).__name__}")


@by_name
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_the_same_fields_message_and_notes(error, duplicate):
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert vars(twin) == vars(error)
    assert str(twin) == str(error)
    assert twin.args == error.args


@by_name
def test_only_where_memory_is_short_a_smaller_batch_is_asked_for(error):
    wanted = isinstance(error, (InfeasibleError, HostMemoryError))
    for said in (" out of memory.", "DefaultCPUAllocator: can't allocate memory"):
        assert (said in error.args[0]) == wanted
        assert said not in str(error)
    assert isinstance(error, RuntimeError) or not wanted


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        OptionError("buget", ("budget",))  # type: ignore[call-arg]  # refused by mypy as well


def test_a_budget_error_is_caught_as_option_value_error_and_as_value_error():
    error = BudgetError(option="budget", value="16G", reason="write 16GiB or 16GB")
    assert isinstance(error, OptionValueError)
    assert isinstance(error, ValueError)


def test_the_advised_budget_is_enough():
    error = next(error for error in EXAMPLES if isinstance(error, InfeasibleError))
    advised = re.search(r'try "(.+?)"', str(error))[1]
    assert error.floor_bytes <= parse_size(advised, None) < error.floor_bytes * 1.01


def test_no_smaller_batch_is_asked_for_where_weights_alone_are_too_many():
    error = next(error for error in EXAMPLES if isinstance(error, InfeasibleError))
    fields = dict(vars(error), weights_bytes=error.budget_bytes)
    assert "or a smaller batch" in str(InfeasibleError(**fields | {"weights_bytes": 2**30 - 1}))
    large = InfeasibleError(**fields)
    assert "a smaller batch does not help" in str(large)
    assert "alone need 1.00 GiB (1073741824 bytes)" in str(large)
    assert large.args == (str(large),), "nothing for those who look for a batch size"


def test_what_is_held_anyway_is_told_where_it_is_much():
    error = next(error for error in EXAMPLES if isinstance(error, InfeasibleError))
    assert "held outside the graph" not in str(error)
    fields = dict(vars(error), needed_bytes=error.floor_bytes - 2**28)
    beside = "at once, plus 256 MiB held outside the graph (optimizer state, other models"
    assert beside in str(InfeasibleError(**fields))


def test_a_budget_that_may_be_too_small_is_not_advised():
    error = next(error for error in EXAMPLES if isinstance(error, InfeasibleError))
    least = str(InfeasibleError(**dict(vars(error), at_least=True)))
    assert "is at least 1.43 GiB" in least
    assert 'than measured so far, so try well above "1.44GiB", or a smaller batch' in least


def spill(cause):
    try:
        raise cause
    except OSError:
        raise SpillError(directory="/scratch", reason=cause.strerror) from cause


def test_a_spill_error_keeps_the_cause_from_the_system():
    cause = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="'/scratch': No space left on device;") as caught:
        spill(cause)
    assert isinstance(caught.value, SpillError)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("buget", "did you mean 'budget'? Known: budget, policy, strict"),
        ("poliy", "did you mean 'policy'? Known: budget, policy, strict"),
        ("zzz", "Known: budget, policy, strict"),
    ],
)
def test_did_you_mean(word, answer):
    assert did_you_mean(word, ["strict", "policy", "budget"]) == answer


def test_a_digest_error_tells_an_edited_file_from_one_for_another_trace():
    edited = DigestError(noun="trace", made_for="aa11", expected="bb22", of="content")
    assert str(edited) == (
        "this trace file was changed after it was saved: its header gives digest aa11, "
        "but its content has digest bb22; restore the file or make a new trace"
    )
    unnamed = DigestError(noun="plan", made_for="", expected="bb22")
    assert str(unnamed).startswith("this plan was made for trace (none given), not for bb22")


def test_a_digest_error_names_the_file():
    edited = DigestError(
        noun="plan", made_for="aa11", expected="bb22", of="content", file="plans/a.json"
    )
    assert str(edited).startswith("the plan file plans/a.json was changed after it was saved: ")
    other = DigestError(noun="plan", made_for="aa11", expected="bb22", file="plans/a.json")
    assert str(other).startswith("the plan in plans/a.json was made for trace aa11, not for bb22")
