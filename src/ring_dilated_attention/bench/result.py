"""What a benchmark measures, what it found, and both as JSON and as tables."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice, check_positive_int
from ..plan import AttentionPlan, costs, plan_attention
from ..units import count_of, in_bytes, in_flop

OURS = "ours"
"""The name of this library among the contenders."""

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of `dilated_attention`.

    Attributes:
        pattern: the branches.
        seq_len: positions of the whole sequence.
        num_heads: query heads.
        num_kv_heads: KV heads; None: as many as query heads.
        head_dim: elements of a head.
        batch_size: sequences in the batch.
        dtype: of query, key and value: bfloat16, float16, float32 or float64.
        is_causal: whether a query sees no later keys.
        layout_name: ``"contiguous"``, ``"zigzag"`` or ``"auto"``, the default: zigzag if causal and
            on several ranks.
        documents: cumulative lengths of packed documents; None: one document.
        name: what reports call the pattern; empty: its branches.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    pattern: DilatedPattern
    seq_len: int
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int = 64
    batch_size: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = False
    layout_name: str = "auto"
    documents: tuple[int, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("seq_len", "num_heads", "head_dim", "batch_size"):
            check_positive_int(name, getattr(self, name))
        check_positive_int("num_kv_heads", self.kv_heads)
        check_choice("dtype", self.dtype, _DTYPES)
        self.plan()  # refuses numbers that do not go together

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of query, key and value."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> costs.TensorSize:
        """The sizes that turn rows of a plan into bytes and FLOPs."""
        size = self.torch_dtype.itemsize
        return costs.TensorSize(batch=self.batch_size, head_dim=self.head_dim, element_size=size)

    def shapes(self, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(batch_size, length, heads, head_dim) of query, and of key and value."""
        query = self.batch_size, length, self.num_heads, self.head_dim
        return query, (*query[:2], self.kv_heads, self.head_dim)

    def layout(self, ranks: int) -> SequenceLayout:
        """Shards as equal as possible."""
        return SequenceLayout.named(self.layout_name, self.seq_len, ranks, is_causal=self.is_causal)

    def plan(self, ranks: int = 1) -> AttentionPlan:
        """The plan of the call on `ranks` ranks."""
        return plan_attention(
            self.pattern,
            self.layout(ranks),
            is_causal=self.is_causal,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            documents=self.documents,
        )

    def flops(self) -> int:
        """Useful FLOPs of forward: 4 * head_dim for each visible (query, key) pair."""
        return sum(costs.flops_by_rank(self.plan(), self.size))

    def __str__(self) -> str:
        groups = "" if self.kv_heads == self.num_heads else f" ({self.kv_heads} KV)"
        documents = len(self.documents or ()) - 1
        return (
            f"{self.name or self.pattern}, {self.seq_len:,} tokens, {self.num_heads}{groups} heads "
            f"of {self.head_dim}, {self.dtype}{', causal' if self.is_causal else ''}"
            f"{f', batch {self.batch_size}' if self.batch_size > 1 else ''}"
            f"{f', {documents:,} documents' if documents > 0 else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one contender took for forward, or for forward+backward, of one workload.

    Attributes:
        workload: what all ranks computed together.
        ranks: number of ranks.
        contender: `OURS` or a baseline.
        backward: whether the gradients of query, key and value were computed too.
        kernel: the kernel that attended; empty: not known.
        reason: why nothing was measured; empty: it was.
        samples_ms: milliseconds of a call in every sample, on the slowest rank.
        flops: useful FLOPs of a call of all ranks; backward counts 2.5 times forward.
        sent: bytes that a rank sends in a call, as planned: the most of any rank; of ours, else 0.
        memory: bytes on the rank that holds most: inputs, and the peak of what a call allocates
            beside them; None on a CPU, where nobody counts.
    """

    workload: Workload
    ranks: int
    contender: str
    backward: bool
    kernel: str = ""
    reason: str = ""
    samples_ms: tuple[float, ...] = ()
    flops: int = 0
    sent: int = 0
    memory: int | None = None

    @property
    def median_ms(self) -> float | None:
        """The median of the samples; None: nothing was measured."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def tflops(self) -> float | None:
        """Useful TFLOP/s of a rank, on average; None: nothing was measured."""
        return self.median_ms and self.flops / self.median_ms / 1e9 / self.ranks

    def time_over(self, contender: str, ranks: int, results: Iterable[Result]) -> float | None:
        """This time over that of `contender` on `ranks` ranks, in `results`; None: not measured."""
        sought = (self.workload, self.backward, contender, ranks)
        for other in results:
            if (other.workload, other.backward, other.contender, other.ranks) == sought:
                return self.median_ms and other.median_ms and self.median_ms / other.median_ms
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """The device, and the versions of the software that computes on it."""
    about: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cpu":
        about |= {"cpu": platform.machine(), "threads": torch.get_num_threads()}
        return about | {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    about |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    found = {x.name: x.version for x in metadata.distributions()}
    return about | {name: found.get(name) for name in ("triton", "flash-attn-4")}


def document(
    results: Sequence[Result], about: dict[str, Any], command: Sequence[str] = ()
) -> dict[str, Any]:
    """Results as JSON can hold them, with their medians, rates and ratios of times.

    Args:
        results: of one run.
        about: of `environment`.
        command: the command line.
    """
    rows = []
    for result in results:
        derived = {
            "median_ms": result.median_ms,
            "tflops_per_rank": result.tflops,
            "time_over_ours": result.time_over(OURS, result.ranks, results),
            "time_over_one_rank": result.time_over(result.contender, 1, results),
        }
        rows.append({**asdict(result), "derived": derived})
    return {"command": list(command), "environment": about, "results": rows}


PASSES = ("forward", "forward+backward")
TIMES = ("system", "median", "lowest", "highest", "rate of a rank", "sent", "memory")

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, headings and rows."""


def report(results: Sequence[Result]) -> Iterator[str | Table]:
    """Lines and a table of each workload: ratios of times in words, times, memory, refusals."""
    for workload in dict.fromkeys(result.workload for result in results):
        own = [result for result in results if result.workload == workload]
        measured = [result for result in own if result.samples_ms]
        yield f"\n{workload}"
        yield from (sentence for result in measured if (sentence := _ratio(result, results)))
        if measured:
            title = "time of a call, ms, and memory of the rank that holds most"
            yield title, TIMES, [_times(result) for result in measured]
        yield from dict.fromkeys(
            f"{x.contender}, {count_of(x.ranks, 'rank')}: {x.reason}" for x in own if x.reason
        )


def _ratio(result: Result, results: Sequence[Result]) -> str:
    """The ratio of times that matters, in words; empty: there is none."""
    ours = result.contender == OURS
    ratio = result.time_over(OURS, 1 if ours else result.ranks, results)
    if ratio is None or (ours and result.ranks == 1):
        return ""
    if ours:
        return f"{_name(result)}: {1 / ratio:.2f} times as fast as on 1 rank"
    return f"{_name(result)}: takes {ratio:.2f} times as long as ours"


def _times(result: Result) -> list[str]:
    times = (result.median_ms or 0, min(result.samples_ms), max(result.samples_ms))
    rate = f"{in_flop(1e12 * (result.tflops or 0))}/s"
    sent = in_bytes(result.sent) if result.sent else ""
    memory = "not known" if result.memory is None else in_bytes(result.memory)
    return [_name(result), *(f"{ms:,.3f}" for ms in times), rate, sent, memory]


def _name(result: Result) -> str:
    kernel = "" if result.kernel in result.contender else f" ({result.kernel})"
    ranks = count_of(result.ranks, "rank")
    return f"{result.contender}{kernel}, {ranks}, {PASSES[result.backward]}"
