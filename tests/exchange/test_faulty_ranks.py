"""What is found of ranks of which one does something wrong, where that is not what it should be."""

import ctypes
import os
import re
import threading
import time

import pytest
from support.faulty_ranks import Outcome, ends_of, keep_stderr, problems, what_is_said

NAME = "killed between calls"
GOOD = "rank 1 has gone; its last call is call 3 (dilated_attention, forward), this is rank 0"


def test_an_error_that_is_as_it_should_be():
    assert problems(NAME, 2, 1, [Outcome(GOOD, 1.0, 1), Outcome("", 0.0, -9)]) == []


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        (Outcome("", 1.0, 0), r"was to say .*, but said '' \(exit status 0\); stderr: nothing"),
        (Outcome("", 1.0, -6, stderr="terminate called"), r"exit status -6\); stderr: terminate"),
        (Outcome(GOOD, 9.0, 1), r"ended after 9\.0 s"),
        (Outcome(GOOD, 1.0, 1, ended=9.0), r"ended after 9\.0 s; its error came after 1\.0 s"),
        (Outcome(GOOD, 1.0, 1, again="ExchangeError: rank 1"), "had more to say.*and then 'Exch"),
        (Outcome(GOOD, 1.0, 0), "was to exit with 1, but"),
    ],
)
def test_an_error_that_is_not(outcome, found):
    problem, *_ = problems(NAME, 2, 1, [outcome, Outcome("", 0.0, -9)])
    assert re.search(found, problem)


def test_a_rank_that_crashes_leaves_its_stderr(tmp_path):
    process = os.fork()
    if not process:
        keep_stderr(tmp_path / "stderr")
        os.write(2, b"terminate called without an active exception\n")
        os.abort()
    os.waitpid(process, 0)
    found = ends_of(tmp_path / "stderr")
    assert "terminate called" in found
    assert "in test_a_rank_that_crashes_leaves_its_stderr" in found  # where Python was


def tell(error):
    what = ctypes.py_object(error)
    ident = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, what)


def test_what_a_rank_is_told_too_late_is_kept():
    threading.Timer(0.05, tell, [KeyError]).start()
    error, _, again, _ = what_is_said(lambda: None, 5)
    assert (error, again) == ("", "KeyError: ")


def test_what_a_rank_is_told_again_is_kept():
    def fail():
        raise ValueError("first")

    threading.Timer(0.05, tell, [KeyError]).start()
    begun = time.time()
    error, when, again, _ = what_is_said(fail, 5)
    assert (error, again) == ("ValueError: first", "KeyError: ")
    assert when < begun + 1


def test_what_a_rank_does_after_an_error_is_told_apart():
    def fail():
        raise ValueError("first")

    def fail_again():
        time.sleep(0.3)
        raise KeyError

    begun = time.time()
    error, when, again, _ = what_is_said(fail, 0, fail_again)
    assert (error, again) == ("ValueError: first", "KeyError: ")
    assert when < begun + 0.3
    error, when, again, ended = what_is_said(fail, 0, lambda: time.sleep(0.3))
    assert (error, again) == ("ValueError: first", "")
    assert ended >= when + 0.3
