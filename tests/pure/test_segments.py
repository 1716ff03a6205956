"""segments: allocator settings are read as torch reads them."""

import pytest

from outcore.execute.segments import (
    EXPANDABLE,
    ROUNDING,
    asked,
    expanding,
    expands,
    is_set,
    not_expanding,
)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ("PYTORCH_ALLOC_CONF", "")),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, ("PYTORCH_ALLOC_CONF", "a:1")),
        (
            {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512"),
        ),
        (
            {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": ""},
            ("PYTORCH_CUDA_ALLOC_CONF", ""),
        ),
    ],
)
def test_the_first_that_is_set_counts(environ, found):
    assert asked(environ) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("max_split_size_mb:512,", None),
        ("expandable_segments:True", True),
        ("max_split_size_mb:512, expandable_segments: True", True),
        ("expandable_segments:False,max_split_size_mb:512", False),
        ("expandable_segments:False,expandable_segments:True", True),
        ("expandable_segments_reserve:1", None),
    ],
)
def test_the_switch_is_told_from_other_settings(text, said):
    assert expands(text) is said


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("", "expandable_segments:True"),
        ("a:1", "a:1,expandable_segments:True"),
        ("a:1, ", "a:1,expandable_segments:True"),
        ("a:[1:2,>:3] , b:1", "a:[1:2,>:3],b:1,expandable_segments:True"),
        ("a:1, max_split_size_mb:512,max_non_split_rounding_mb : 30", f"a:1,{EXPANDABLE}"),
    ],
)
def test_what_was_asked_for_stays_if_it_makes_sense(text, more):
    assert expanding(text) == more
    assert expands(more)


def test_what_was_asked_for_stays_without_expandable_segments():
    text = not_expanding("max_split_size_mb:512, ")
    assert text == "max_split_size_mb:512,expandable_segments:False"
    assert expands(text) is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", False),
        ("expandable_segments:True", False),
        ("roundup_power2_divisions:4", True),
        ("max_split_size_mb:512, roundup_power2_divisions:[256:1,512:2,>:8]", True),
    ],
)
def test_sizes_that_are_rounded_up(text, said):
    assert is_set(ROUNDING, text) is said
