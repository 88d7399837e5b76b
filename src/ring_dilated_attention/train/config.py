"""Options of a training run, to and from JSON, and the presets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..checks import RANK_TIMEOUT, check_seconds, check_seed
from ..functional import EXCHANGES, Schedule
from ..layout import LAYOUTS, SequenceLayout
from ..nn import Checkpoint, LongNetConfig, check_checkpoint
from ..pattern import check_choice, check_positive_float, check_positive_int
from ..tiles import BACKENDS, Backend
from .data import HELDOUT_FRACTION
from .tokenizer import BYTES, NUM_BYTES

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")

MAX_SIZE = 1 << 24  # of a dimension of the model
MAX_STEPS = 1 << 53  # the largest that a float counts by ones, for the learning rate

DEFAULT_MODEL = LongNetConfig(
    num_layers=3,
    embed_dim=128,
    num_heads=4,
    ffn_dim=512,
    segment_lengths=(256, 1024, 4096),
    dilation_rates=(1, 2, 4),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. The loss curve does not depend on how it is spread.

    The defaults are for two minutes on two CPU cores, as two ranks.

    Args:
        out: folder of the run: log, curve and checkpoints.
        data: files and folders to train on; none means the standard library's sources.
        model: shape of the model.
        tokenizer: ``"bytes"`` (None is the same), or the path of a ``tokenizer.json`` of a
            byte-level tokenizer.
        train_tokenizer: number of tokens of a tokenizer to train on the training text, at least
            257; None trains none. Excludes `tokenizer`.
        init_from: folder of the weights that the run begins with: a checkpoint, or plain weights;
            None, the default: drawn from `seed`.
        seq_len: global length of a training sequence, in tokens (of bytes, in bytes).
        batch_size: sequences a step, over all ranks.
        steps: step at which the run is complete.
        learning_rate: peak of the schedule.
        final_learning_rate: end of its cosine, as a fraction of the peak.
        warmup_steps: steps of linear warm-up.
        weight_decay: of AdamW, for matrices only.
        beta1: of AdamW.
        beta2: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
        seed: decides initial weights and sampling.
        heldout_fraction: of the text, held out of training.
        eval_every: steps between held-out evaluations; there is one at the end in any case.
        eval_windows: held-out sequences in an evaluation.
        save_every: steps between checkpoints; there is one at the end in any case.
        keep: how many of the newest checkpoints to keep.
        layout: how a sequence is cut over its ranks: ``"contiguous"``, ``"zigzag"``, or ``"auto"``:
            zigzag on several ranks.
        sequence_ranks: ranks that share a sequence; None means all.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"``, the default, gathers where all of them are at most the size of a shard.
        backend: kernels that compute the tiles, one of `tiles.BACKENDS`; ``"auto"``, the default,
            takes the fastest one that supports the tensors, and any other name is used or refused.
        device: ``"auto"`` (CUDA where there is one), ``"cpu"`` or ``"cuda"``.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast around the model.
        activation_checkpoint: what backward recomputes: ``"none"``, ``"full"`` (each block whole)
            or ``"keep_attention"`` (each block but for its attention).
        activation_checkpoint_blocks: with ``"keep_attention"``, only every Nth block's input is
            stored; the blocks between are recomputed. Default 1.
        chunk_rows: rows of a chunk of all that treats every row alone; None is all at once; see
            `LongNet`.
        timeout: seconds that a rank waits for another one before the run fails. It must exceed
            what ranks may differ by, such as rank 0's plot of the curve and training of a
            tokenizer. To start, ranks have at least 300 seconds.
        tensorboard: whether to write the log as events of TensorBoard too.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range; the message names it.
    """

    out: Path
    data: tuple[str, ...] = ()
    model: LongNetConfig = field(default=DEFAULT_MODEL)
    tokenizer: str | None = None
    train_tokenizer: int | None = None
    init_from: str | None = None
    seq_len: int = 4096
    batch_size: int = 1
    steps: int = 350
    learning_rate: float = 6e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    heldout_fraction: float = HELDOUT_FRACTION
    eval_every: int = 50
    eval_windows: int = 16
    save_every: int = 100
    keep: int = 3
    layout: str = "auto"
    sequence_ranks: int | None = None
    exchange: Schedule = "auto"
    backend: Backend = "auto"
    device: str = "auto"
    dtype: str = "float32"
    activation_checkpoint: Checkpoint = "none"
    activation_checkpoint_blocks: int = 1
    chunk_rows: int | None = None
    timeout: float = RANK_TIMEOUT
    tensorboard: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "data", tuple(map(str, self.data)))
        for name in (
            "seq_len",
            "batch_size",
            "steps",
            "eval_every",
            "eval_windows",
            "save_every",
            "keep",
        ):
            check_positive_int(name, getattr(self, name))
        for name in ("sequence_ranks", "chunk_rows"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("warmup_steps", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        for name in ("steps", "warmup_steps"):
            if getattr(self, name) > MAX_STEPS:
                raise ValueError(
                    f"{name} must be at most {MAX_STEPS}, got {_digits(getattr(self, name))}"
                )
        check_seed(self.seed)
        check_seconds("timeout", check_positive_float("timeout", self.timeout))
        for name, low, high in (
            ("learning_rate", 0.0, math.inf),
            ("final_learning_rate", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("max_grad_norm", 0.0, math.inf),
            ("heldout_fraction", 0.0, 0.5),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            zero_is_off = name not in ("learning_rate", "max_grad_norm", "heldout_fraction")
            if not (low <= value <= high) or math.isinf(value) or not (value or zero_is_off):
                lowest = ">= 0" if zero_is_off else "> 0"
                highest = "" if math.isinf(high) else f" and <= {high:g}"
                raise ValueError(f"{name} must be {lowest}{highest}, got {value!r}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)!r}")
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        check_checkpoint(self.activation_checkpoint, self.activation_checkpoint_blocks)
        self._check_texts()

    def _check_texts(self) -> None:
        if not isinstance(self.tensorboard, bool):
            raise TypeError(f"tensorboard must be a bool, got {self.tensorboard!r}")
        for name in ("tokenizer", "init_from"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} must be a text or None, got {getattr(self, name)!r}")
        if self.train_tokenizer is None:
            return
        if check_positive_int("train_tokenizer", self.train_tokenizer) <= NUM_BYTES:
            raise ValueError(
                f"train_tokenizer must be above {NUM_BYTES}, the number of bytes; got "
                f"{self.train_tokenizer}"
            )
        if self.tokenizer is not None:
            raise ValueError(
                f"tokenizer and train_tokenizer exclude each other; got {self.tokenizer!r} and "
                f"{self.train_tokenizer}"
            )

    @property
    def of_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self.tokenizer in (None, BYTES) and self.train_tokenizer is None

    def group_size(self, world_size: int) -> int:
        """How many of `world_size` ranks share a sequence.

        Raises:
            ValueError: the sequence groups do not fit `world_size`, or outnumber the sequences.
        """
        size = self.sequence_ranks or world_size
        if world_size % size:
            raise ValueError(
                f"sequence_ranks must divide the number of ranks, {world_size}; got {size}"
            )
        if world_size // size > self.batch_size:
            raise ValueError(
                f"{world_size} ranks in sequence groups of {size} make {world_size // size} "
                f"groups, and each needs a sequence; got batch_size {self.batch_size}"
            )
        return size

    def sequence_layout(self, group_size: int) -> SequenceLayout:
        """Which positions of a sequence each rank of its group holds."""
        return SequenceLayout.named(self.layout, self.seq_len, group_size, is_causal=True)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step number `step` (from 0): linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        floor = self.final_learning_rate
        return self.learning_rate * (floor + (1 - floor) * cosine)

    def with_options(self, options: Mapping[str, Any]) -> TrainConfig:
        """A copy with these options changed, of the run or (by their names) of its model.

        Raises:
            TypeError: there is no such option, or its value has the wrong type.
            ValueError: a value is out of range.
        """
        own = {f.name for f in fields(self)}
        check_sizes(options)
        model = replace(self.model, **{k: v for k, v in options.items() if k not in own})
        return replace(self, **{"model": model, **{k: v for k, v in options.items() if k in own}})

    def to_json(self) -> str:
        """This config as JSON; `from_json` reads it back."""
        return json.dumps({**asdict(self), "out": str(self.out)})

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read what `to_json` wrote.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: this is not JSON of a `TrainConfig`.
        """
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The same from parsed JSON."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown training options: {', '.join(unknown)}")
        check_sizes(values["model"])
        return cls(**{**values, "model": LongNetConfig(**values["model"])})


def check_sizes(options: Mapping[str, Any]) -> None:
    """Refuse sizes that no machine can hold, before a tensor is made of one."""
    for name in (
        *("vocab_size", "num_layers", "embed_dim", "num_heads", "ffn_dim"),
        "train_tokenizer",
    ):
        value = options.get(name)
        if isinstance(value, int) and value > MAX_SIZE:
            raise ValueError(f"{name} must be at most {MAX_SIZE}, got {_digits(value)}")


def _digits(value: int) -> str:
    """An int for a message: of a very large one only the number of its bits."""
    return str(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"


DEFAULT_PRESET = "small"

_LONGNET_BASE: dict[str, Any] = {
    # 85 million parameters in the blocks, heads of 64 as in LongNet's experiments.
    "num_layers": 12,
    "embed_dim": 768,
    "num_heads": 12,
    "ffn_dim": 3072,
    # LongNet's pattern, and a branch that reaches across the whole sequence: at 8,388,608 bytes it
    # shows a query up to 4,096 keys, and takes a thousandth of the work.
    "segment_lengths": (2048, 4096, 8192, 16384, 32768, None),
    "dilation_rates": (1, 2, 4, 6, 12, 2048),
    "seq_len": 2_097_152,
    "dtype": "bfloat16",
    "activation_checkpoint": "keep_attention",
    "chunk_rows": 65_536,
    # A step sees millions of bytes, so a run has few of them.
    "steps": 100,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "eval_every": 20,
    "eval_windows": 1,
    "save_every": 50,
    "keep": 2,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {DEFAULT_PRESET: {}, "longnet-base": _LONGNET_BASE}
)
"""Options by the names that they have in `TrainConfig` and `LongNetConfig`; those that a preset
leaves out keep their defaults. ``small`` is the defaults: minutes on two CPU cores.
``longnet-base`` is for GPUs: by counting live tensors, 100 to 120 GiB each for 2,097,152 bytes of a
sequence (more with many ranks, where attention's gradients are summed in float32), and 18 GiB less
with `activation_checkpoint_blocks` 3, which recomputes more."""


def preset_options(name: str) -> Mapping[str, Any]:
    """The options of a preset.

    Raises:
        ValueError: there is no such preset.
    """
    check_choice("preset", name, tuple(PRESETS))
    return PRESETS[name]
