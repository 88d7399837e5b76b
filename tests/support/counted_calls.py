"""How much work something is, whatever the machine does besides."""

import sys
from concurrent.futures import ProcessPoolExecutor

from ring_dilated_attention.checks.ranks import forked_context


def count_calls(function, *arguments):
    """How many functions a function calls, Python's and those in C, and what it returns.

    It runs in a process of its own: what other tests have set up there (torch's compiler, for one)
    does not get along with a profiler.

    Args:
        function: defined at the top of a module.
        arguments: passed on; what can be pickled, as what it returns.
    """
    with ProcessPoolExecutor(1, forked_context()) as pool:
        return pool.submit(_counted, function, arguments).result()


def _counted(function, arguments):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return calls, result
