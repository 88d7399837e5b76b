"""Random calls against the brute-force reference in float64: how many are wrong, or crash.

    python benchmarks/fuzz.py --calls 20000 --ranks 1-5
    python benchmarks/fuzz.py --calls 2000 --device cuda --backend all --seconds 500
    python benchmarks/fuzz.py --calls 1 --seed 4711 --verbose     # one call again

Every call runs forward and backward on all ranks of a group, which are threads of this process. Its
tensors are views of every kind (`ViewKind`) in storages of NaN, and its pattern, layout,
documents, lengths, mask and options are drawn too. Call number i is drawn from seed S + i and from
the other arguments alone. Exits with 1 unless all were right: nothing is drawn that is refused.
The count so far is printed every half a minute; `--seconds` ends a run before all calls are made.

On CUDA shapes come from a small set, because kernels are compiled, and cuDNN plans, for each.
Needs torch and numpy; back ends that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from ring_dilated_attention import DilatedPattern, HeadSlice, SequenceLayout
from ring_dilated_attention.checks import (
    Case,
    ViewKind,
    combine,
    make_layout,
    nan_in_uninitialized_memory,
    run_case,
)
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.pattern import Length, Window
from ring_dilated_attention.tiles import select_backend

BACKENDS = {
    "cpu": ("auto", "sdpa", "cpu_flash", "eager"),
    "cuda": ("auto", "sdpa", "fa4", "cudnn", "flash", "efficient", "triton", "eager"),
}
"""Of ``--backend all``. On a CPU Triton's interpreter is slow, and takes one thread: name it."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCALES = (1e-18, 1e-3, 2.0)
CAPPED = ("auto", "fa4", "eager")
"""Back ends that compute a softcap."""
PATTERNS = (  # on CUDA
    DilatedPattern.dense(),
    DilatedPattern([16, None], [1, 3]),
    DilatedPattern([5, 24, None], [2, 3, 4], head_offsets="blocked", zero_keys=True),
    DilatedPattern([9, 40], [1, 2], head_branches="split"),
)
WINDOWS = (
    DilatedPattern.window(7),
    DilatedPattern([Window(9, 5), None], [1, 3]),
    DilatedPattern([Window(12), 16], [2, 1]),
)
NO_WINDOWS = ("triton", "cudnn", "efficient")
"""Back ends that do not compute them."""
HUNG = 300
"""Seconds after which a call is taken to hang: the process prints where it is, and exits."""
REPORT = 30
"""Seconds between two counts."""


class Choices(NamedTuple):
    """What calls are drawn from.

    Attributes:
        ranks: the fewest and the most.
        device: ``"cpu"`` or ``"cuda"``.
        backends: by name, with the (dtype, head_dim) pairs that each takes.
    """

    ranks: tuple[int, int]
    device: str
    backends: dict[str, list[tuple[torch.dtype, int]]]


def choices(ranks: tuple[int, int], device: str, names: Sequence[str]) -> Choices:
    """The back ends of these names that are available; the others are printed."""
    head_dims = (1, 3, 8, 16, 24) if device == "cpu" else (16, 64)
    backends = {}
    for name in names:
        taken, reason = [], ""
        for dtype, head_dim in itertools.product(DTYPES, head_dims):
            try:
                select_backend(name, torch.device(device, 0), dtype, head_dim)
                taken.append((dtype, head_dim))
            except ValueError as error:
                reason = str(error)
        if taken:
            backends[name] = taken
        else:
            print(f"left out: {reason}")
    if not backends:
        raise SystemExit("no back end is left")
    return Choices(ranks, device, backends)


def draw(seed: int, among: Choices) -> Case:
    """The call of a seed."""
    random = Random(seed)
    backend = random.choice(list(among.backends))
    dtype, head_dim = random.choice(among.backends[backend])
    is_small = among.device == "cuda"
    least, most = among.ranks
    if backend == "triton" and among.device == "cpu":
        most = least  # the interpreter does not take threads
    world_size = random.randint(least, most)
    windows = backend not in NO_WINDOWS
    if is_small:
        pattern = random.choice(PATTERNS + WINDOWS * windows)
    else:
        pattern = draw_pattern(random, windows=windows)
    if is_small:
        # cuDNN plans each shape of a tile, which takes it longer than all else.
        length = 24 if backend == "cudnn" else random.choice([24, 47])
        layout = make_layout(random.choice(["contiguous", "zigzag", "uneven"]), length, world_size)
        batch, num_kv_heads, members = random.choice([(1, 4, 1), (2, 2, 2), (2, 1, 3)])
    else:
        length = random.choice([random.randint(1, 12), random.randint(1, 60)])
        layout = draw_layout(random, length, world_size)
        batch, num_kv_heads = random.randint(1, 3), random.randint(1, 4)
        members = random.randint(1, 3)
    branch_gradients = random.choice(["exact", "exact", "detached"])
    loss_of = random.choice([("out",), ("out",), ("out", "lse"), ("lse",)])
    is_mixed = branch_gradients == "detached" and pattern.mixes_branches
    if is_mixed:
        loss_of = ("out",)  # there is no gradient of lse
    has_sink = random.random() < 0.3 and not is_mixed
    softcap = random.choice([None, None, 0.5, 3.0, 50.0]) if backend in CAPPED else None
    if random.random() < 0.2:  # those of one rank of tensor parallelism
        start = random.randint(0, 5)
        stop = start + num_kv_heads
        heads = HeadSlice(start, stop, stop + random.randint(0, 5))
        pattern = pattern.of_heads(heads, num_kv_heads)
    return Case(
        pattern=pattern,
        layout=layout,
        num_heads=num_kv_heads * members,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        batch=batch,
        is_causal=random.random() < 0.5,
        dtype=dtype,
        exchange=random.choice(["auto", "ring", "gather", "heads"]),
        backend=backend,
        seed=seed,
        device=among.device,
        views=tuple(draw_view(random) for _ in range(4)),
        wanted=tuple(name for name in Case.wanted if random.random() < 0.8),
        scale=random.choice([None] * 10 + list(SCALES)),
        workspace=random.choice([None, None, 0.01, 1.0]),
        **draw_packing(random, length, batch, is_small=is_small),
        branch_gradients=branch_gradients,
        loss_of=loss_of,
        softcap=softcap,
        has_sink=has_sink,
    )


def draw_pattern(random: Random, *, windows: bool) -> DilatedPattern:
    """Any branches and options."""
    kinds: list[Callable[[], Length]] = [lambda: None, lambda: random.randint(1, 70)]
    if windows:
        kinds.append(lambda: Window(random.randint(0, 40), random.choice([0, 0, 7, 40])))
    branches = [(random.choice(kinds)(), random.randint(1, 9)) for _ in range(random.randint(1, 4))]
    options: dict[str, Any] = random.choice(
        [{}, {"head_offsets": "blocked"}, {"head_branches": "split"}]
    )
    lengths, rates = zip(*branches, strict=True)
    return DilatedPattern(lengths, rates, zero_keys=random.random() < 0.3, **options)


def draw_view(random: Random) -> ViewKind:
    """A kind with a name half of the time, else a mixture."""
    if random.random() < 0.5:
        return random.choice(list(ViewKind.named().values()))
    order = random.sample(range(4), 4)
    if random.random() < 0.7:  # head_dim is innermost, as most callers have it
        order = [*(dim for dim in order if dim != 3), 3]
    return ViewKind(
        expanded=tuple(dim for dim in range(4) if random.random() < 0.15),
        order=tuple(order),
        steps=tuple(random.choice([1, 1, 1, 2, 3]) for _ in range(4)),
        offset=random.choice([0, 0, 1, 8, 13]),
    )


def draw_layout(random: Random, length: int, world_size: int) -> SequenceLayout:
    """Any ranges of any lengths, in any order."""
    kind = random.choice(["contiguous", "zigzag", "uneven", "any", "any"])
    if kind != "any":
        return make_layout(kind, length, world_size)
    cuts = sorted(random.randint(0, length) for _ in range(random.randint(0, 3 * world_size)))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    chunks = list(itertools.pairwise([0, *cuts, length]))
    for chunk in random.sample(chunks, len(chunks)):
        random.choice(ranges).append(chunk)
    return SequenceLayout(ranges)


def draw_packing(random: Random, length: int, batch: int, *, is_small: bool) -> dict[str, Any]:
    """Documents and lengths, or a mask: each, both or neither."""
    packing: dict[str, Any] = {}
    stops = [0, 7, 16, length] if is_small else range(length + 1)
    if random.random() < 0.4:
        packing["lengths"] = tuple(random.choice(stops) for _ in range(batch))
        packing["as_mask"] = random.random() < 0.5
    if random.random() < 0.4:
        # With lengths, documents may end anywhere from the longest on.
        longest = max(packing.get("lengths", [length]))
        end = max(random.choice([longest, length]), 1)
        cuts = [7, 10] if is_small else random.choices(range(1, length + 1), k=4)
        borders = {0, end, *(cut for cut in cuts if cut < end)}
        empty = random.choices(sorted(borders), k=random.choice([0, 0, 1, 4]))  # documents
        packing["documents"] = tuple(sorted([*borders, *empty]))
    return packing


class Verdict(NamedTuple):
    """What came of a call: ``"right"``, ``"wrong"``, ``"crashed"`` or ``"refused"``, and why."""

    kind: str
    why: str = ""


def judge(case: Case) -> Verdict:
    """Run a call on all of its ranks and compare."""
    wanted = case.references()

    def rank(ends: Any) -> Any:
        return [run_case(case, ends, wanted)]

    try:
        (outcome,) = combine(run_loopback(case.layout.world_size, rank))
    except ValueError as error:  # a TypeError is none: arguments have the types that they must
        return Verdict("refused", str(error))
    except Exception:
        return Verdict("crashed", traceback.format_exc())
    if outcome.passes(case.dtype):
        return Verdict("right")
    errors = ", ".join(f"{name} {outcome.error(name):.1e}" for name in outcome.squares)
    moved = f"{outcome.sent_bytes} of {outcome.planned_bytes} planned bytes sent"
    return Verdict("wrong", f"{errors}; {'finite' if outcome.valid else 'NOT VALID'}; {moved}")


def fuzz(
    calls: int, seed: int, among: Choices, *, seconds: float = math.inf, verbose: bool = False
) -> Counter[str]:
    """Run calls, for at most so long, print those that are not right, and count verdicts."""
    counts: Counter[str] = Counter()
    begun = reported = time.perf_counter()
    fills = nan_in_uninitialized_memory() if among.device == "cpu" else contextlib.nullcontext()
    with fills:
        for number in range(calls):
            if time.perf_counter() - begun > seconds:
                break
            case = draw(seed + number, among)
            if verbose:
                print(f"seed {seed + number}: {case}", flush=True)
            faulthandler.dump_traceback_later(HUNG, exit=True, file=sys.__stderr__)
            kind, why = judge(case)
            counts[kind] += 1
            if kind != "right":
                print(f"{kind}: seed {seed + number}: {why}", flush=True)
            if time.perf_counter() - reported > REPORT:
                reported = time.perf_counter()
                print(_summary(counts, begun), flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(_summary(counts, begun))
    return counts


def _summary(counts: Counter[str], begun: float) -> str:
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("wrong", "crashed", "refused"))
    seconds = time.perf_counter() - begun
    return f"{counts.total()} calls: {kinds} ({seconds:.0f} s)"


def _ranks(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000, help="how many")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no call after them")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the next adds 1")
    parser.add_argument("--ranks", type=_ranks, default=(1, 5), help="for example 1-5")
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu")
    parser.add_argument("--backend", default="all", help="all, or names with commas between")
    parser.add_argument("--verbose", action="store_true", help="print every call before it runs")
    given = parser.parse_args(arguments)
    names = BACKENDS[given.device] if given.backend == "all" else given.backend.split(",")
    among = choices(given.ranks, given.device, names)
    counts = fuzz(given.calls, given.seed, among, seconds=given.seconds, verbose=given.verbose)
    return int(counts["right"] < counts.total())


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are small, and ranks are threads
    sys.exit(main())
