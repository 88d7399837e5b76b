"""What a function's compiled kernels were called with is called again, or nothing is kept."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tolerances import assert_close_to

from ring_dilated_attention.tiles.replay import MOST_KEPT, Replay


class Function:
    """Like flash-attn-4's: it looks kernels up in caches of two functions, and allocates.

    Args:
        copies: kernels are given a copy of x.
        hides: one is called without a look-up.
        nests: one is given tensors in a tuple.
        allocates: of the `Replay`.

    Attributes:
        chosen: how often it went through its Python.
    """

    def __init__(self, *, copies=False, hides=False, nests=False, allocates=True):
        self.copies, self.hides, self.nests, self.chosen = copies, hides, nests, 0
        self.owners = [SimpleNamespace(compile_cache={}) for _ in range(2)]
        self.caches = [owner.compile_cache for owner in self.owners]
        self.replay = Replay(lambda: self.owners, allocates=allocates)

    def prepare(self, x, part):
        part.copy_(x.double().sum(-1))

    def finish(self, x, y, part, out, scale, nothing):
        assert nothing is None
        out.copy_(scale * (x + y) * part[..., None])

    def compute(self, x, y, out, scale):
        self.chosen += 1
        x, y = (x.clone(), y) if self.copies else (x.detach(), y.detach())
        part = torch.empty(x.shape[:-1])
        first, second = (owner.compile_cache for owner in self.owners)
        first["prepare"] = self.prepare
        first["prepare"](x, part)
        second["finish"] = self.finish
        second["nested"] = lambda pair, *rest: self.finish(*pair, *rest)
        given = part, out, scale, None
        if self.nests:
            second["nested"]((x, y), *given)
        else:
            (self.finish if self.hides else second["finish"])(x, y, *given)

    def run(self, x, y, out, scale=2.0, memo=None):
        def call(noting):
            with noting:
                self.compute(x, y, out, scale)

        try:
            self.replay((x, y, out), scale, call, memo)
        finally:
            found = [owner.compile_cache for owner in self.owners]
            assert all(a is b for a, b in zip(found, self.caches, strict=True))

    def check(self, shape=(3, 4), scale=2.0, step=1, memo=None):
        x, y = torch.randn(2, *shape[:-1], shape[-1] * step)[..., ::step]
        out = torch.full(shape, torch.nan)
        self.run(x, y, out, scale, memo)
        exact = scale * (x.double() + y) * x.double().sum(-1, keepdim=True)
        assert_close_to(out, exact, terms=shape[-1])


def test_a_kind_of_call_goes_through_its_python_once():
    function = Function()
    for kind in ({}, {"shape": (5, 4)}, {"scale": -1.0}, {"step": 2}):
        for _ in range(4):
            function.check(**kind)
    assert function.chosen == 4
    for scale in range(MOST_KEPT + 5):
        function.check(scale=float(scale))
    assert len(function.replay.kept) == MOST_KEPT


def test_a_memo_saves_looking_for_the_kind():
    function = Function()
    memos: list[dict[Any, Any]] = [{}, {}]
    for memo in memos:
        for _ in range(3):
            function.check(memo=memo)
    function.replay.kept.clear()  # whoever has a memo needs nothing else
    for memo in memos:
        function.check(memo=memo)
    assert function.chosen == 1
    function.check()
    assert function.chosen == 2


@pytest.mark.parametrize(
    "how",
    [{"copies": True}, {"allocates": False}, {"hides": True}, {"nests": True}],
    ids=lambda how: next(iter(how)),
)
def test_what_is_not_understood_is_not_kept(how):
    function, memo = Function(**how), dict[Any, Any]()
    for given in (None, None, memo, memo):
        function.check(memo=given)
    assert function.chosen == 4
    assert not memo


def test_tensors_at_one_address_are_not_told_apart():
    function, x, out = Function(), torch.randn(3, 4), torch.empty(3, 4)
    for _ in range(3):
        function.run(x, x, out)
        assert_close_to(out, 4 * x.double() * x.double().sum(-1, keepdim=True), terms=4)
    assert function.chosen == 3


def test_an_error_leaves_the_library_as_it_was():
    function = Function()
    with pytest.raises(RuntimeError):
        function.run(torch.randn(3, 4), torch.randn(3, 5), torch.empty(3, 4))
    function.check()
    function.check()
    assert (function.chosen, len(function.replay.kept)) == (2, 1)


def test_calls_of_other_threads_are_not_noted():
    function = Function()
    prepare, threads = function.prepare, list[threading.Thread]()

    def interrupted(*given):
        prepare(*given)
        if not threads:
            call = function.owners[0].compile_cache["prepare"]
            threads.append(threading.Thread(target=other))  # it looks its kernel up
            threads[0].start()
            threads[0].join()
            assert call is not interrupted

    def other():
        call = function.owners[0].compile_cache["prepare"]
        assert call is interrupted
        call(torch.randn(7, 4), torch.empty(7))

    vars(function)["prepare"] = interrupted
    for _ in range(3):
        function.check()
    assert function.chosen == 1
