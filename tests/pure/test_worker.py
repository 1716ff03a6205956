"""worker: the process that answers stays for the next question, but not for long."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from outcore import worker

CODE = """
import logging, os, sys
from outcore import worker

def answer(question):
    print("to nobody")
    if question == "leave":
        sys.exit("left")
    log.info("asked %s", question)
    return os.getpid()

log = logging.getLogger("asked")
worker.serve(answer, log)
"""


@pytest.fixture(autouse=True)
def alone():
    worker.dismiss()
    yield
    worker.dismiss()


def nobody(_: str) -> None:
    pass


def ask(question="", code=CODE, tell=nobody):
    return worker.ask(code, question, tell)


def test_the_next_question_goes_to_the_same_process():
    told: list[str] = []
    first = ask("one", tell=told.append)
    assert first != os.getpid()
    assert ask("two", tell=told.append) == first
    assert told == ["asked one", "asked two"]


def test_one_that_would_import_otherwise_is_another(monkeypatch):
    first = ask()
    monkeypatch.setenv("OUTCORE_ANYTHING", "1")
    second = ask()
    assert second != first
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
    assert ask() != second
    assert ask(code=CODE + "\n") != second
    assert len(worker._waiting) == 1


def test_one_that_was_ended_is_replaced():
    first = ask()
    os.kill(first, 9)
    assert ask() != first


def test_one_that_gives_no_answer_says_why():
    first = ask()
    with pytest.raises(subprocess.CalledProcessError) as error:
        ask("leave")
    assert error.value.returncode == 1
    assert error.value.stderr == b"to nobody\nleft\n"
    assert not worker._waiting
    assert ask() != first


def test_it_ends_where_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.05)
    ask()
    (waiting,) = worker._waiting
    deadline = time.monotonic() + 30
    while waiting._process.returncode is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not worker._waiting


def test_one_for_a_single_question_does_not_stay():
    worker.ask_once(CODE, "", nobody)
    assert not worker._waiting


MEETING = """
import os, time
from pathlib import Path
from outcore import worker

def answer(question):
    mine, others = question
    Path(mine).touch()
    while not all(map(os.path.exists, others)):
        time.sleep(0.01)
    return os.getpid()

worker.serve(answer, __import__("logging").getLogger())
"""
"""An answer comes once all files of a question exist: its own, and those of other questions."""


def test_several_answer_at_a_time(tmp_path):
    files = [str(tmp_path / name) for name in "abc"]
    found = list(worker.ask_each(MEETING, [(each, files) for each in files], nobody, 3))
    assert len({*found}) == 3
    assert len(worker._waiting) == 1
    assert worker.ask(MEETING, (files[0], ()), nobody) in found


def test_no_more_than_may_answer_at_a_time(tmp_path):
    files = [str(tmp_path / name) for name in "abc"]
    answers = worker.ask_each(MEETING, [(each, ()) for each in files], nobody, 1)
    first = next(answers)
    time.sleep(0.1)
    assert [*map(os.path.exists, files)] == [True, False, False]
    assert [*answers] == [first] * 2


def test_those_whose_answers_nobody_wants_are_ended(tmp_path):
    """The one that has answered stays."""
    never, files = str(tmp_path / "never"), [str(tmp_path / name) for name in "abc"]
    questions = [(files[0], files), *((each, [never]) for each in files[1:])]
    answers = worker.ask_each(MEETING, questions, nobody, 3)
    first = next(answers)
    answers.close()
    assert worker.ask(MEETING, (files[0], ()), nobody) == first


def test_one_of_several_that_gives_no_answer_says_why():
    answers = worker.ask_each(CODE, ["stay", "leave", "late"], nobody, 2)
    next(answers)
    with pytest.raises(subprocess.CalledProcessError):
        next(answers)
    assert [*answers] == []
    ask()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_one_of_its_own():
    first = ask()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(writer, b"%d" % ask())
            worker.dismiss()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    assert int(os.read(reader, 99)) != first
    os.close(reader)
    assert ask() == first


def test_interrupted_it_is_ended():
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.ask(CODE, "", interrupt)
    assert not worker._waiting


def test_a_process_that_ends_leaves_none():
    code = f"from outcore import worker; print(worker.ask({CODE!r}, 0, print))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    assert not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout.splitlines()[-1]), 0)
