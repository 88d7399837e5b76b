"""The ranks of a run: who they are, the collectives of training, and how they are asked to stop."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import check_meeting_point, launched, local_rank, not_met
from .attempt import store_of_attempt
from .config import TrainConfig
from .errors import START, TrainingError, Watch, one_line

_T = TypeVar("_T")
BUCKET_NUMEL = 1 << 23  # 32 MiB of float32: the extra memory that summing the gradients takes


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place: ranks are a grid of (data, sequence), and a row shares its sequences.

    Attributes:
        rank: this rank among all.
        size: number of ranks.
        data_rank: which sequence group this rank is in.
        data_size: number of sequence groups.
        group: the ranks of this rank's sequence group; None where that is one rank.
        group_rank: this rank in its sequence group.
        group_size: number of ranks that share a sequence.
        device: where this rank computes.
        watch: what finds a missing rank; None where there is one rank.
    """

    rank: int
    size: int
    data_rank: int
    data_size: int
    group: dist.ProcessGroup | None
    group_rank: int
    group_size: int
    device: torch.device
    watch: Watch | None = None

    def begin(self, what: str) -> None:
        """Say what this rank begins: messages about missing ranks name it. Takes microseconds."""
        if self.watch is not None:
            self.watch.begin(what)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def meet(self) -> None:
        """Wait for all ranks on the host, within the group's timeout.

        Called before this process waits for its device. The host can give up on a missing rank and
        say which one it is; a device that waits in NCCL cannot.
        """
        self.sum(torch.zeros(()))

    def sum_gradients(
        self, parameters: Iterable[nn.Parameter], *, bucket_numel: int = BUCKET_NUMEL
    ) -> None:
        """Sum every gradient over all ranks in float32, in place, through few flat buffers.

        Args:
            parameters: equal on all ranks, each with a gradient.
            bucket_numel: a buffer is summed as soon as it holds this many elements; the last one
                may hold fewer.
        """
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        numel = 0
        for parameter in parameters:
            assert parameter.grad is not None, "every parameter takes part on every rank"
            bucket.append(parameter.grad)
            numel += parameter.grad.numel()
            if numel >= bucket_numel:
                self._sum_bucket(bucket)
                bucket, numel = [], 0
        if bucket:
            self._sum_bucket(bucket)

    def _sum_bucket(self, gradients: list[Tensor]) -> None:
        flat = self.sum(torch.cat([g.reshape(-1).float() for g in gradients]))
        parts = torch.split(flat, [g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, by rank; for small things outside the training step."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def everywhere(self, function: Callable[[], _T]) -> _T:
        """Call `function` on this rank; if it fails on any rank, fail on all.

        Every rank must call this. It keeps ranks from waiting for one that has given up.

        Raises:
            ValueError: `function` raised a `ValueError` or an `OSError` on some rank; the message
                is that of the first rank that failed.
            TrainingError: it raised something else there.
        """
        result: _T | None = None
        error: tuple[bool, str] | None = None
        try:
            result = function()
        except (ValueError, OSError) as raised:
            error = True, one_line(raised)
        except Exception as raised:
            if self.size == 1:
                raise
            error = False, one_line(f"{type(raised).__name__}: {raised}")
        errors = self.gather(error)
        for rank, failure in enumerate(errors):
            if failure is not None:
                bad_input, text = failure
                where = "" if None not in errors else f"rank {rank}: "
                raise (ValueError if bad_input else TrainingError)(f"{where}{text}")
        return result  # type: ignore[return-value]  # None only where function returns None

    def peak_memory(self) -> int:
        """Bytes at their peak: of the CUDA allocator, or resident in this process on the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Join the ranks of this process's group, or of the environment (as torchrun sets it).

    A process group that is initialised already is used, with its own timeout, and left as it is.
    Otherwise ``RANK`` and its companions decide, with gloo for CPU tensors and NCCL for CUDA ones
    and ``config.timeout``, until the end of the context. Without either this process is the only
    rank.

    Raises:
        ValueError: the sequence groups do not fit the number of ranks, there is no CUDA device for
            this rank, or a variable of the launcher is malformed.
        TrainingError: the ranks do not all join within the timeout, or one is lost while the
            context is entered; the message names it.
    """
    number = local_rank()
    if dist.is_initialized():
        yield _world(config, local_device(config.device, number), None)
        return
    rank, size = launched() or (0, 1)
    config.group_size(size)
    device = local_device(config.device, number)
    if size == 1:
        yield _alone(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout)
    check_meeting_point()
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            store = store_of_attempt(store, rank, size, START)
        watch = Watch(store, rank, size, config.timeout)
        watch.meet()
        # gloo beside NCCL: small collectives that need not wait for what the device has to compute.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TrainingError):
            raise
        raise TrainingError(one_line(not_met(rank, size, error))) from error
    try:
        yield _world(config, device, watch)
    except BaseException as error:
        explained = watch.explained(error)
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()


def _alone(device: torch.device) -> World:
    return World(
        rank=0,
        size=1,
        data_rank=0,
        data_size=1,
        group=None,
        group_rank=0,
        group_size=1,
        device=device,
    )


def _world(config: TrainConfig, device: torch.device, watch: Watch | None) -> World:
    """This rank's place in the grid of the initialised process group."""
    size = dist.get_world_size()
    group_size = config.group_size(size)
    if size == 1:
        return _alone(device)
    data_rank, group_rank = divmod(dist.get_rank(), group_size)
    return World(
        rank=dist.get_rank(),
        size=size,
        data_rank=data_rank,
        data_size=size // group_size,
        group=sequence_group(config, size, group_size, data_rank),
        group_rank=group_rank,
        group_size=group_size,
        device=device,
        watch=watch,
    )


def sequence_group(
    config: TrainConfig, size: int, group_size: int, data_rank: int
) -> dist.ProcessGroup | None:
    """The group of this rank's row of the grid; every rank makes those of all rows."""
    if group_size == 1:
        return None
    if group_size == size:
        world: dist.ProcessGroup | None = dist.group.WORLD
        return world
    rows = [range(first, first + group_size) for first in range(0, size, group_size)]
    # A new group does not take the timeout of the first one.
    timeout = timedelta(seconds=config.timeout)
    groups: list[dist.ProcessGroup] = [dist.new_group(list(row), timeout=timeout) for row in rows]
    return groups[data_rank]


def local_device(name: str, local_rank: int) -> torch.device:
    """The device of a local rank.

    Args:
        name: ``"auto"`` (CUDA where there is one), ``"cpu"`` or ``"cuda"``.
        local_rank: number of the rank on this machine.

    Raises:
        ValueError: there are fewer CUDA devices than that.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} needs a CUDA device of its own; this machine has "
            f"{torch.cuda.device_count()} (use fewer ranks, or device cpu)"
        )
    return torch.device("cuda", local_rank)


# SIGHUP, a closed terminal, does not exist on Windows.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class OnFirstSignal:
    """While entered, the first of `SIGNALS` calls `function`; a second one acts as ever.

    SIGTERM and SIGHUP stay ignored where they are, as under nohup.
    Handlers can only be set in the main thread; entered in another one, this does nothing.

    Args:
        function: called from the signal handler.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> OnFirstSignal:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle)
                for number in SIGNALS
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._function()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class StopRequest:
    """Whether this rank has been asked to stop.

    Args:
        pipe: descriptor of the read end of a pipe that asks for it when its other end is closed,
            by the launcher or by the launcher's death; None if there is no launcher.
    """

    def __init__(self, pipe: int | None = None) -> None:
        self._pipe = pipe
        self._asked = False

    def ask(self) -> None:
        """Ask this rank to stop."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether a stop has been asked for."""
        if self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            self._asked = True
        return self._asked
