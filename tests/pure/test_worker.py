"""worker: the process that answers stays for the next question, but not for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

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


def test_one_process_serves_all_tests():
    """Each test would start another one if pytest's own variable were in the environment."""
    assert "PYTEST_CURRENT_TEST" not in os.environ


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


def test_it_ends_where_nobody_is_left_to_ask():
    """A process that the asking one forked may keep the pipe open."""
    looking = CODE.replace("log =", "worker.ORPHAN_SECONDS = 0.05\nlog =")
    code = f"""
import os
from outcore import worker
print(worker.ask({looking!r}, 0, print), flush=True)
if not os.fork():
    os.close(1)
    os.close(2)
    import time
    time.sleep(25)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    deadline = time.monotonic() + 20
    stat = Path(f"/proc/{done.stdout.split()[-1]}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":  # nobody may have buried it
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def ask_each(questions, at_once, *, code=MEETING, tell=nobody, asking=worker.ask):
    return worker.ask_each(code, questions, tell, at_once, asking)


@pytest.fixture
def files(tmp_path):
    return [str(tmp_path / name) for name in "abc"]


def test_several_answer_at_a_time(files):
    found = [answer.result() for answer in ask_each([(each, files) for each in files], 3)]
    assert len({*found}) == 3
    assert len(worker._waiting) == 1
    assert ask((files[0], ()), MEETING) in found


def test_no_more_than_may_answer_at_a_time(files):
    answers = ask_each([(each, ()) for each in files], 1)
    first = next(answers).result()
    time.sleep(0.1)
    assert [*map(os.path.exists, files)] == [True, False, False]
    assert [answer.result() for answer in answers] == [first] * 2
    assert [*ask_each([], 1)] == []


def test_each_may_have_a_process_of_its_own(files):
    answers = ask_each([(each, ()) for each in files], 1, asking=worker.ask_once)
    assert len({answer.result() for answer in answers}) == 3
    assert not worker._waiting


def test_those_whose_answers_nobody_wants_are_ended(files, tmp_path):
    """The one that has answered stays."""
    never = str(tmp_path / "never")
    questions = [(files[0], files), *((each, [never]) for each in files[1:])]
    answers = ask_each(questions, 3)
    first, begun = next(answers).result(), time.monotonic()
    answers.close()
    assert time.monotonic() - begun < 30
    assert ask((files[0], ()), MEETING) == first


def test_one_that_is_found_too_late_is_ended():
    crew, late = worker._Crew(nobody), worker.Worker(CODE)
    crew.dismiss()
    with pytest.raises(CancelledError):
        crew.add(late)
    assert late._process.returncode is not None


def test_one_that_another_thread_asks_by_now_is_left_alone(files):
    answers = ask_each([(files[0], ())], 1)
    first = next(answers).result()
    mine = worker._take(MEETING)
    assert mine is not None
    answers.close()
    assert mine.ask((files[1], ()), nobody) == first
    mine.end()


def test_one_that_cannot_be_compared_is_ended(monkeypatch):
    pid = ask()

    def gone(_):
        raise FileNotFoundError

    monkeypatch.setattr(worker, "_surroundings", gone)
    with pytest.raises(FileNotFoundError):
        ask()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_torch_sets_as_it_compiles_changes_nothing(monkeypatch):
    first = ask()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert ask() == first
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert ask() != first


def test_an_interrupt_from_the_terminal_does_not_end_it():
    pid = ask()
    os.kill(pid, signal.SIGINT)
    assert ask() == pid


def test_it_imports_from_folders_with_any_name(tmp_path, monkeypatch):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    assert ask(code=f"import only_here{CODE}") != os.getpid()


def test_where_one_of_several_gives_no_answer_the_others_do():
    found = list(ask_each(["one", "leave", "two"], 3, code=CODE))
    with pytest.raises(subprocess.CalledProcessError) as error:
        found[1].result()
    assert error.value.stderr == b"to nobody\nleft\n"
    assert min(found[0].result(), found[2].result()) > 0


def test_only_the_one_whose_answer_is_next_is_heard():
    told: list[str] = []
    crew = worker._Crew(told.append)
    crew.tell(1, "too early")
    crew.tell(0, "now")
    done = Future[None]()
    done.set_result(None)
    assert crew.next(deque([done])) is done
    crew.tell(0, "over")
    crew.tell(1, "now, too")
    assert told == ["now", "now, too"]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def preparing(tmp_path):
    """A function that has a worker prepared until a file exists, which it returns."""

    def begin():
        begun, go = tmp_path / "begun", tmp_path / "go"
        worker.prepare(MEETING, (str(begun), [str(go)]))
        wait_for(begun.exists)
        return go

    yield begin
    worker._leave()


def thread():
    assert worker._preparing is not None
    return worker._preparing[0]


@pytest.mark.parametrize("several", [False, True])
def test_a_question_waits_for_the_worker_that_is_prepared(preparing, tmp_path, several):
    go, asked = preparing(), (str(tmp_path / "later"), ())

    def later():
        return next(ask_each([asked], 1)).result() if several else ask(asked, MEETING)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(later)
        time.sleep(0.2)
        assert not (tmp_path / "later").exists()
        go.touch()
        first = answer.result()
    assert ask((str(go), ()), MEETING) == first
    assert worker._preparing is None


def test_one_that_takes_too_long_is_given_up(preparing, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "PREPARING_SECONDS", 0.1)
    preparing()
    waiting = thread()
    assert ask((str(tmp_path / "later"), ()), MEETING) > 0
    waiting.join(30)
    assert not waiting.is_alive()


def test_only_one_is_prepared_at_a_time(preparing, tmp_path):
    preparing()
    first = worker._preparing
    worker.prepare(MEETING, (str(tmp_path / "other"), ()))
    assert worker._preparing is first
    worker.dismiss()
    assert thread().is_alive()


def test_one_that_cannot_be_prepared_is_replaced():
    worker.prepare(CODE, "leave")
    preparing = thread()
    assert ask("stay") > 0
    assert not preparing.is_alive()
    assert worker._preparing is None


@pytest.mark.parametrize("before", [False, True])
def test_where_no_thread_can_start_none_is_prepared(monkeypatch, before):
    if before:  # nothing was asked of it since
        worker.prepare(CODE, "stay")
        thread().join(30)

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        worker.prepare(CODE, "stay")
    assert worker._preparing is None
    assert ask("stay") > 0


def test_a_process_that_ends_leaves_none_that_is_prepared(tmp_path):
    begun = str(tmp_path / "begun")
    code = f"""
import os, time
from outcore import worker
worker.prepare({MEETING!r}, ({begun!r}, ["/nowhere"]))
deadline = time.monotonic() + 30
while not os.path.exists({begun!r}) and time.monotonic() < deadline:
    time.sleep(0.01)
((made, _),) = worker._preparing[1]._workers
print(made._process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    assert not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


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
