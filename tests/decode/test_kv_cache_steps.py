"""Whatever is done with a KV cache, in any order: its attention is that of the full forward."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.strategies import cached_patterns
from support.tolerances import assert_close_to

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    kernels,
)
from ring_dilated_attention.checks import reference_attention, run_ranks
from ring_dilated_attention.checks.ranks import world_exchange
from ring_dilated_attention.exchange import SoloExchange, run_loopback
from ring_dilated_attention.kernels import profile_of

HEAD_DIM = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the decoding kernels
fractions = st.lists(st.floats(0, 1), min_size=4, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("attend"), st.integers(1, 12)),
    st.tuples(st.just("attend"), st.just(1)),
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("rewind"), st.just(1.0) | st.floats(0, 1) | fractions),
    st.tuples(st.just("reserve"), st.integers(1, 40)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("reset"), st.none() | st.integers(0, 9)),
    st.tuples(
        st.just("prefill"),
        st.integers(1, 50),
        st.sampled_from(["contiguous", "zigzag"]),
        st.none() | fractions,  # lengths
        st.none() | st.floats(0, 1),  # a border of documents
        st.none() | st.integers(0, 9),  # which row begins anew
    ),
)


@st.composite
def runs(draw):
    pattern, kv_heads = draw(cached_patterns()), draw(st.integers(1, 3))
    any_length = None not in pattern.segment_lengths and draw(st.booleans())
    return {
        "pattern": pattern,
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "batch": draw(st.integers(1, 3)),
        "max_length": None if any_length else draw(st.integers(1, 60)),
        "max_rewind": draw(st.just(0) | st.integers(1, 20)),
        "world_size": draw(st.sampled_from([1, 2, 3, 5])),
        "sharded": draw(st.booleans()),
        "steps": draw(st.lists(STEPS, min_size=1, max_size=9)),
        "seed": draw(st.integers(0, 1000)),
        "backend": "auto",
        "dtype": torch.float64,
    }


class Model:
    """The documents as they are, and one row at a time."""

    def __init__(self, batch, kv_heads):
        empty = torch.empty(2, 0, kv_heads, HEAD_DIM, dtype=torch.float64)
        self.documents, self.longest = [empty] * batch, [0] * batch

    @property
    def lengths(self):
        return [document.shape[1] for document in self.documents]

    def begin(self, row, document):
        self.documents[row], self.longest[row] = document, document.shape[1]

    def append(self, both):
        """(2, batch, m, kv_heads, head_dim)."""
        for row, document in enumerate(self.documents):
            self.documents[row] = torch.cat([document, both[:, row].double().cpu()], 1)
            self.longest[row] = max(self.longest[row], self.lengths[row])

    def attend(self, query, pattern, dtype):
        """Of the newest positions, (batch, m, heads, head_dim), computed in `dtype`."""
        query, count = query.to(dtype), query.shape[1]
        outs, lses = [], []
        for row, (keys, values) in enumerate(self.documents):
            before = query.new_zeros(len(keys) - count, *query.shape[2:])
            q, k, v = torch.cat([before, query[row]]), keys.to(dtype), values.to(dtype)
            out, lse = reference_attention(q[None], k[None], v[None], pattern, is_causal=True)
            outs.append(out[:, len(before) :])
            lses.append(lse[:, :, len(before) :])
        return torch.cat(outs), torch.cat(lses)


class Run:
    """One rank's cache beside the model."""

    def __init__(self, case, ends):
        self.case, self.ends = case, ends
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.dtype = case["dtype"]
        self.device = DEVICE if case["backend"] == "triton" else "cpu"
        self.cache = DilatedKVCache(
            case["pattern"], case["batch"], case["kv_heads"], HEAD_DIM, dtype=self.dtype,
            device=self.device, max_length=case["max_length"], max_rewind=case["max_rewind"],
            group=ends, sharded=case["sharded"],
        )  # fmt: skip
        self.cache.keys.fill_(torch.nan)  # what nobody wrote is not to be read
        self.cache.values.fill_(torch.nan)
        self.model = Model(case["batch"], case["kv_heads"])
        self.results: list[torch.Tensor] = []

    def randn(self, *shape):
        found = torch.randn(*shape, dtype=self.dtype, generator=self.generator)
        return found.to(self.device)

    def new(self, count):
        if self.cache.plan.max_length is not None:
            self.cache.reserve(max(self.model.lengths) + count)
        return self.randn(2, len(self.model.lengths), count, self.case["kv_heads"], HEAD_DIM)

    def attend(self, count):
        both = key, value = self.new(count)
        query = self.randn(key.shape[0], count, self.case["heads"], HEAD_DIM)
        backend = self.case["backend"]
        if backend == "triton" and count > 1 and self.cache.plan.has_windows:
            with pytest.raises(ValueError, match="at most 1 new positions a call to a sliding win"):
                cached_attention(query, key, value, self.cache, backend=backend)
            backend = "auto"
        got = cached_attention(query, key, value, self.cache, return_lse=True, backend=backend)
        self.model.append(both)
        self.results += got
        if self.ends.rank:
            return  # as the first rank, bit by bit
        want, plain = (
            self.model.attend(query.cpu(), self.case["pattern"], dtype)
            for dtype in (torch.float64, self.dtype)
        )
        for x, y, rough in zip(got, want, plain, strict=True):
            assert_close_to(x, y, plain=rough, factor=4.0, terms=64)

    def append(self, count):
        both = self.new(count)
        self.cache.append(*both)
        self.model.append(both)

    def rewind(self, some):
        shares = some if isinstance(some, list) else [some] * 4
        model = self.model
        most = [
            min(n, n - longest + self.case["max_rewind"])
            for n, longest in zip(model.lengths, model.longest, strict=True)
        ]
        counts = [int(share * n) for share, n in zip(shares, most, strict=False)]
        counts += [0] * (len(most) - len(counts))
        if not isinstance(some, list):
            counts = [min(counts)] * len(counts)
        self.cache.rewind(counts if isinstance(some, list) else counts[0])
        for row, (count, length) in enumerate(zip(counts, model.lengths, strict=True)):
            model.documents[row] = model.documents[row][:, : length - count]

    def reserve(self, more):
        self.cache.reserve((self.cache.plan.max_length or 0) + more)

    def select(self, rows):
        rows = [row % len(self.model.lengths) for row in rows]
        self.cache.select(rows)
        self.model.documents = [self.model.documents[row] for row in rows]
        self.model.longest = [self.model.longest[row] for row in rows]

    def reset(self, row):
        rows = list(range(len(self.model.lengths)))
        rows = rows if row is None else [row % len(rows)]
        self.cache.reset(None if row is None else rows)
        for each in rows:
            self.model.begin(each, self.model.documents[each][:, :0])

    def prefill(self, count, kind, lengths, border, row):
        batch = len(self.model.lengths)
        rows = list(range(batch)) if row is None else [row % batch]
        if self.cache.plan.max_length is not None:
            self.cache.reserve(count)
        layout = SequenceLayout.named(kind, count, self.ends.world_size, is_causal=True)
        both = self.randn(2, len(rows), count, self.case["kv_heads"], HEAD_DIM)
        valid = [count] * len(rows)
        if lengths is not None:
            valid = [int(lengths[i % 4] * count) for i in range(len(rows))]
        documents = None if border is None else sorted({0, int(border * count), count})
        self.cache.prefill(
            *(layout.shard(x, self.ends.rank, 1) for x in both),
            rows=None if row is None else rows,
            layout=layout,
            documents=documents,
            lengths=None if lengths is None else valid,
        )
        for i, (each, length) in enumerate(zip(rows, valid, strict=True)):
            first = max([n for n in documents or [0] if n < length], default=0)
            self.model.begin(each, both[:, i, first:length].double().cpu())


def run_steps(case, ends):
    run = Run(case, ends)
    for name, *arguments in [*case["steps"], ("attend", 1), ("attend", 3)]:
        getattr(run, name)(*arguments)
        assert list(run.cache.known_lengths) == run.cache.lengths.tolist() == run.model.lengths
        plan, batch = run.cache.plan, len(run.model.lengths)
        assert run.cache.nbytes == plan.nbytes(batch, HEAD_DIM, run.dtype.itemsize)
    return run.results


def check_steps(case):
    first, *others = run_loopback(case["world_size"], partial(run_steps, case))
    for results in others:
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))
    return first


OF_STEPS: dict[str, Any] = {
    "kv_heads": 3,
    "heads": 3,
    "batch": 1,
    "max_rewind": 0,
    "sharded": True,
    "seed": 0,
    "backend": "auto",
    "dtype": torch.float64,
}


@settings(max_examples=80)
@given(runs())
@example(  # the second of three heads has an offset behind max_length, until there is more room
    {
        **OF_STEPS,
        "pattern": DilatedPattern([None], [2]),
        "max_length": 1,
        "world_size": 2,
        "steps": [("attend", 1), ("attend", 1)],
    }
)
@example(  # many members in 20 positions: two of every 5, not one of 4
    {
        **OF_STEPS,
        "pattern": DilatedPattern([5, None], [4, 5]),
        "max_length": 200,
        "max_rewind": 20,
        "world_size": 3,
        "steps": [("append", 17), ("attend", 20), ("rewind", 1.0)],
    }
)
@example(  # a window longer than the prompt, and one of the position alone, on two ranks
    {
        **OF_STEPS,
        "pattern": DilatedPattern([(9, 0), (0, 3), 6], [1, 1, 2]),
        "heads": 6,
        "max_length": None,
        "max_rewind": 5,
        "world_size": 2,
        "steps": [
            ("prefill", 4, "zigzag", None, None, None),
            *(("attend", count) for count in (1, 4, 1, 23, 5)),
            *[("rewind", 1.0), ("attend", 5), ("attend", 2), ("append", 11), ("attend", 7)],
        ],
    }
)
@example(  # a window that no document outgrows, until there is more room
    {
        **OF_STEPS,
        "pattern": DilatedPattern.window(12),
        "batch": 2,
        "max_length": 10,
        "max_rewind": 3,
        "world_size": 3,
        "steps": [("attend", 7), ("attend", 1), ("attend", 9), ("select", [1]), ("attend", 30)],
    }
)
def test_any_steps(case):
    check_steps(case)


@settings(max_examples=9 if DEVICE == "cpu" else 100)  # the interpreter is slow
@given(runs())
@example(
    {
        **OF_STEPS,
        "pattern": DilatedPattern([5, None], [4, 3]),
        "heads": 6,
        "max_length": 60,
        "max_rewind": 20,
        "steps": [("append", 17), ("attend", 20), ("rewind", 1.0), ("attend", 3), ("rewind", 0.3)],
    }
)
@example(
    {
        **OF_STEPS,
        "pattern": DilatedPattern([(7, 0), (0, 0), None], [1, 1, 3]),
        "heads": 6,
        "max_length": 60,
        "max_rewind": 2,
        "steps": [("append", 5), *[("attend", 1)] * 4, ("append", 6), ("rewind", 1.0)],
    }
)
def test_any_steps_by_the_kernels(case):
    pytest.importorskip("triton")
    case = {**case, "world_size": 1, "backend": "triton", "dtype": torch.float32}
    run_steps(case, SoloExchange())


@pytest.mark.parametrize("rounds", [4, 33])
def test_however_the_kernels_cut_it_into_programs(rounds, monkeypatch):
    """And more query heads than a block has rows."""
    pytest.importorskip("triton")
    profile = replace(profile_of(torch.device(DEVICE)), multiprocessors=9)
    monkeypatch.setattr(kernels.decode, "profile_of", lambda _: profile)
    monkeypatch.setattr(kernels.decode, "ROUNDS", rounds)
    kernels.decode.launches_of.cache_clear()
    for pattern, kv_heads, heads, batch, prompt, *counts in (
        (DilatedPattern([None, 32], [1, 3]), 2, 6, 1, 170, 1, 1, 5),
        (DilatedPattern.dense(), 2, 2, 2, 71, 3, 1),
        (DilatedPattern([8, 16, 32], [1, 2, 5]), 1, 4, 1, 40, 64, 1),
    ):
        case = {**OF_STEPS, "pattern": pattern, "kv_heads": kv_heads, "heads": heads}
        case |= {"batch": batch, "max_length": 200, "backend": "triton", "dtype": torch.float32}
        steps = [("append", prompt), *(("attend", count) for count in counts)]
        run_steps({**case, "steps": steps}, SoloExchange())
    kernels.decode.launches_of.cache_clear()


def generation(**changes):
    """A prompt of three lengths, and what follows it."""
    counts = [1, 1, 5, 1, 16, 1]
    return {
        **OF_STEPS,
        "pattern": DilatedPattern([12, 24, None], [1, 5, 3]),
        "heads": 6,
        "batch": 3,
        "max_length": 100,
        "world_size": 1,
        "steps": [
            ("prefill", 61, "zigzag", [1.0, 0.22, 0.0, 0.0], None, None),
            *(("attend", count) for count in counts),
        ],
        **changes,
    }


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"world_size": 3}, {"backend": "eager"}], ids=str)
def test_cached_attention_in_dtypes(options, dtype):
    """Of rounded inputs; it errs as plain code in that precision does."""
    out, lse, *_ = check_steps(generation(dtype=dtype, **options))
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def _process(rank, world_size, case):
    return run_steps(case, world_exchange())


@pytest.mark.parametrize(("sharded", "dtype"), [(True, torch.bfloat16), (False, torch.float64)])
def test_cached_attention_in_processes(sharded, dtype):
    case = generation(world_size=3, sharded=sharded, dtype=dtype)
    first, *others = run_ranks(_process, 3, case)
    for results in others:
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))
