"""segments: allocator settings are read as torch reads them."""

import pytest

from outcore.execute.segments import EXPANDABLE, asked, expanding, expands, rounds_up


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
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("max_split_size_mb:512, ", "max_split_size_mb:512,expandable_segments:True"),
    ],
)
def test_what_was_asked_for_stays(text, more):
    assert expanding(text) == more
    assert expands(more)


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
    assert rounds_up(text) is said
