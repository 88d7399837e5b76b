"""What a function's compiled kernels were called with is called again, or nothing is kept."""

import threading
from typing import Any

import pytest
import torch
from support.tolerances import assert_close_to

from ring_dilated_attention.tiles import TileGradients, TileInputs, fa4
from ring_dilated_attention.tiles.replay import MOST_KEPT, Replay


class Library:
    """Like flash-attn-4: functions that look kernels up in caches, and allocate."""

    def __init__(self):
        self.chosen = 0  # how often a function went through its Python

    def prepare(self, x, part):
        part.copy_(x.double().sum(-1))

    def finish(self, x, y, part, out, scale, nothing):
        assert nothing is None
        out.copy_(scale * (x + y) * part[..., None])


class Function:
    def __init__(self):
        self.compile_cache = {}


def made(*, copies=False, allocates=True, hides=False, nests=False):
    """A function of (x, y, out), and its Replay."""
    library, first, second = Library(), Function(), Function()

    def function(x, y, out, scale):
        library.chosen += 1
        x, y = (x.clone(), y) if copies else (x.detach(), y.detach())
        part = torch.empty(x.shape[:-1])
        first.compile_cache["prepare"] = library.prepare
        first.compile_cache["prepare"](x, part)
        second.compile_cache["finish"] = library.finish
        given = x, y, part, out, scale, None
        if nests:
            second.compile_cache["nested"] = lambda pair, *rest: library.finish(*pair, *rest)
            second.compile_cache["nested"](given[:2], *given[2:])
        elif hides:
            library.finish(*given)
        else:
            second.compile_cache["finish"](*given)

    replay = Replay(lambda: [first, second], allocates=allocates)

    def run(x, y, out, scale=2.0, memo=None):
        def call(noting):
            with noting:
                function(x, y, out, scale)

        replay((x, y, out), scale, call, memo)

    return library, run, replay, (first, second)


def check(run, shape=(3, 4), scale=2.0, step=1, memo=None):
    x, y = torch.randn(2, *shape[:-1], shape[-1] * step)[..., ::step]
    out = torch.full(shape, torch.nan)
    run(x, y, out, scale, memo)
    exact = scale * (x.double() + y) * x.double().sum(-1, keepdim=True)
    assert_close_to(out, exact, terms=shape[-1])


def test_a_kind_of_call_goes_through_its_python_once():
    library, run, _, owners = made()
    caches = [owner.compile_cache for owner in owners]
    for _ in range(4):
        check(run)
    assert library.chosen == 1
    assert all(owner.compile_cache is cache for owner, cache in zip(owners, caches, strict=True))
    for kind in ({"shape": (5, 4)}, {"scale": -1.0}, {"step": 2}):
        for _ in range(3):
            check(run, **kind)
    assert library.chosen == 4


def test_a_memo_saves_looking_for_the_kind():
    library, run, replay, _ = made()
    memos: list[dict[Any, Any]] = [{}, {}]
    for memo in memos:
        for _ in range(3):
            check(run, memo=memo)
    assert library.chosen == 1
    replay.kept.clear()  # whoever has a memo needs nothing else
    for memo in memos:
        check(run, memo=memo)
    assert library.chosen == 1
    check(run)
    assert library.chosen == 2


@pytest.mark.parametrize(
    "how",
    [{"copies": True}, {"allocates": False}, {"hides": True}, {"nests": True}],
    ids=lambda how: next(iter(how)),
)
def test_what_is_not_understood_is_not_kept(how):
    library, run, *_ = made(**how)
    memo: dict[Any, Any] = {}
    for given in (None, None, memo, memo):
        check(run, memo=given)
    assert library.chosen == 4
    assert not memo


def test_tensors_at_one_address_are_not_told_apart():
    library, run, *_ = made()
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    for _ in range(3):
        run(x, x, out)
        assert_close_to(out, 4 * x.double() * x.double().sum(-1, keepdim=True), terms=4)
    assert library.chosen == 3


def test_an_error_leaves_the_library_as_it_was():
    library, run, replay, owners = made()
    caches = [owner.compile_cache for owner in owners]
    with pytest.raises(RuntimeError):
        run(torch.randn(3, 4), torch.randn(3, 5), torch.empty(3, 4))
    assert all(owner.compile_cache is cache for owner, cache in zip(owners, caches, strict=True))
    check(run)
    check(run)
    assert (library.chosen, len(replay.kept)) == (2, 1)


def test_calls_of_other_threads_are_not_noted():
    library, run, _, (first, _) = made()
    prepare = library.prepare
    threads: list[threading.Thread] = []

    def interrupted(*given):
        prepare(*given)
        if not threads:
            call = first.compile_cache["prepare"]  # another thread looks its kernel up
            threads.append(threading.Thread(target=other))
            threads[0].start()
            threads[0].join()
            assert call is not interrupted

    def other():
        call = first.compile_cache["prepare"]
        assert call is interrupted
        call(torch.randn(7, 4), torch.empty(7))

    library.prepare = interrupted
    for _ in range(3):
        check(run)
    assert library.chosen == 1


def test_few_kinds_are_kept():
    _, run, replay, _ = made()
    for scale in range(MOST_KEPT + 5):
        check(run, scale=float(scale))
    assert len(replay.kept) == MOST_KEPT


def _lse_given_for(lse, monkeypatch):
    """What flash-attn-4's backward is given for an lse (batch, heads, rows)."""
    given = []
    monkeypatch.setattr(fa4, "BACKWARDS", lambda tensors, *_: given.append(tensors[5]))
    q, k, v, dout, out = torch.zeros(5, lse.shape[0], lse.shape[2], lse.shape[1], 8).unbind()
    fa4.FA4.backward(TileInputs(q, k, v, False, 1.0), TileGradients(dout, out, lse))
    (found,) = given
    assert torch.equal(found, lse)
    assert found.data_ptr() % 16 == 0
    assert found.stride(2) == 1
    assert all(stride % 4 == 0 for stride in found.stride()[:2]) or found.is_contiguous()
    return found


def test_flash_attn_4_is_given_an_lse_that_it_does_not_copy(monkeypatch):
    """It would copy one whose rows are not aligned, in each call, and none could be kept."""
    whole = torch.randn(2, 3, 64)
    segments = whole.unflatten(2, (4, 16)).transpose(1, 2).flatten(0, 1)  # copied: two strides
    aligned = whole[:1].unflatten(2, (4, 16)).transpose(1, 2)[0]
    assert _lse_given_for(aligned, monkeypatch).data_ptr() == aligned.data_ptr()
    assert _lse_given_for(segments, monkeypatch).data_ptr() == segments.data_ptr()
    odd = torch.randn(1, 3, 61)
    for other in (odd[:, 1:], odd[:, :, 4:20], whole[:, :, 1:17], whole[:, :, ::2]):
        assert _lse_given_for(other, monkeypatch).data_ptr() != other.data_ptr()
