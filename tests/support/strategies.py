"""Hypothesis strategies for patterns, layouts and whole cases."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from ring_dilated_attention import DilatedPattern, HeadSlice, SequenceLayout
from ring_dilated_attention.checks import Case, ViewKind
from ring_dilated_attention.pattern import Window

WORLD_SIZES = (1, 2, 3, 4, 5, 7)


@st.composite
def patterns(draw: st.DrawFn, *, windows: bool = True) -> DilatedPattern:
    lengths: st.SearchStrategy[int | Window | None] = st.none() | st.integers(1, 70)
    if windows:
        lengths |= st.builds(Window, st.integers(1, 40), st.integers(0, 20))
    branches = draw(st.lists(st.tuples(lengths, st.integers(1, 9)), min_size=1, max_size=4))
    options: dict[str, Any] = draw(
        st.sampled_from(
            [{}, {"head_offsets": "blocked"}, {"head_branches": "split"}],
        )
    )
    options = {**options, "zero_keys": draw(st.booleans())}
    return DilatedPattern([w for w, _ in branches], [r for _, r in branches], **options)


def cached_patterns() -> st.SearchStrategy[DilatedPattern]:
    """Those that a KV cache takes: windows are not dilated."""

    def cached(pattern: DilatedPattern) -> DilatedPattern:
        rates = [1 if isinstance(x.segment_length, Window) else x[1] for x in pattern.branches]
        return replace(pattern, dilation_rates=rates)

    return patterns().map(cached)


@st.composite
def layouts(draw: st.DrawFn, max_length: int = 60) -> SequenceLayout:
    world_size = draw(st.sampled_from(WORLD_SIZES))
    length = draw(st.integers(1, max_length))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "any"]))
    if kind == "contiguous":
        return SequenceLayout.contiguous(length, world_size)
    if kind == "zigzag":
        return SequenceLayout.zigzag(length, world_size)
    cuts = draw(st.lists(st.integers(0, length), max_size=3 * world_size))
    bounds = [0, *sorted(cuts), length]
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for chunk in draw(st.permutations(list(itertools.pairwise(bounds)))):
        ranges[draw(st.integers(0, world_size - 1))].append(chunk)
    return SequenceLayout(ranges)


@st.composite
def views(draw: st.DrawFn) -> ViewKind:
    """How a tensor lies in memory: one of the kinds with a name, or any mixture."""
    named = draw(st.none() | st.sampled_from(list(ViewKind.named())))
    if named:
        return ViewKind.named()[named]
    return ViewKind(
        expanded=tuple(draw(st.sets(st.integers(0, 3), max_size=2))),
        order=tuple(draw(st.permutations(range(4)))),
        steps=draw(st.tuples(*[st.integers(1, 3)] * 4)),
        offset=draw(st.integers(0, 9)),
    )


@st.composite
def head_slices(draw: st.DrawFn, num_kv_heads: int) -> HeadSlice | None:
    """All heads of a layer, or those of one rank of tensor parallelism."""
    before, behind = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    stop = before + num_kv_heads
    return draw(st.sampled_from([None, HeadSlice(before, stop, stop + behind)]))


@st.composite
def cases(draw: st.DrawFn, *, windows: bool = True) -> Case:
    num_kv_heads = draw(st.integers(1, 4))
    return Case(
        pattern=draw(patterns(windows=windows)).of_heads(
            draw(head_slices(num_kv_heads)), num_kv_heads
        ),
        layout=draw(layouts()),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([1, 3, 8, 16])),
        batch=draw(st.integers(1, 3)),
        is_causal=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        exchange=draw(st.sampled_from(["auto", "ring", "gather"])),
        backend=draw(st.sampled_from(["auto", "eager", "cpu_flash"])),
        seed=draw(st.integers(0, 1000)),
        views=draw(st.tuples(views(), views(), views(), views())),
        wanted=tuple(draw(st.lists(st.sampled_from(Case.wanted), unique=True))),
    )
