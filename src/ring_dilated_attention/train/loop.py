"""The training loop: every rank runs `run`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..nn import LongNet
from . import checkpoint
from .checkpoint import Checkpoint
from .config import TrainConfig, check_memory, check_text
from .data import ByteCorpus, shard_windows
from .errors import TrainingError, one_line, os_error_text
from .ranks import OnFirstSignal, StopRequest, World, joined, local_device
from .run_folder import Report, RunLock, RunLog, check_free, plot_losses


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: number of steps done.
        heldout_bits_per_byte: of the last evaluation of this process; None if there was none.
        checkpoint: folder of the last checkpoint.
        stopped: whether the run was asked to stop before its last step.
    """

    step: int
    heldout_bits_per_byte: float | None
    checkpoint: Path
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every step needs."""

    config: TrainConfig
    world: World
    corpus: ByteCorpus
    layout: SequenceLayout
    model: LongNet


def check_run(
    config: TrainConfig,
    world_size: int,
    local_ranks: int,
    *,
    resume: bool,
    start: Checkpoint | None = None,
) -> tuple[ByteCorpus, Checkpoint | None]:
    """Read the data, and find and check the checkpoint on `resume`: all that can fail early.

    Args:
        config: the options.
        world_size: number of ranks.
        local_ranks: number of ranks on this machine.
        resume: whether to go on from the newest checkpoint of ``config.out``.
        start: that checkpoint where it is known already.

    Returns:
        The corpus, and the checkpoint to go on from.

    Raises:
        ValueError: data, checkpoint, memory, ranks and options do not fit together, or `resume` is
            False and the folder holds a run.
    """
    check_memory(config, world_size, local_ranks)
    config.sequence_layout(config.group_size(world_size))
    if not resume:
        check_free(config.out)
    elif start is None:
        start = checkpoint.newest(config.out)
    if start is not None:
        start.check_model(config.model)
        if start.step >= config.steps:
            raise ValueError(
                f"{start.path} has done {start.step} of {config.steps} steps; raise steps to "
                "continue"
            )
    corpus = ByteCorpus.load(
        config.data,
        heldout_fraction=config.heldout_fraction,
        check_size=lambda size, description: check_text(size, local_ranks, description),
    )
    corpus.check_window(config.sequence_length)
    if start is not None and start.fingerprint != corpus.fingerprint:
        raise ValueError(
            f"{start.path} was trained on other data than {corpus.description} holds now"
        )
    return corpus, start


def run(config: TrainConfig, *, resume: bool = False, stop: StopRequest | None = None) -> Outcome:
    """Train, on the ranks of this process's group or of torchrun, or on this one alone.

    Every rank of a sequence group sees the same sequences, each its own positions. The loss is the
    sum of all ranks' token cross-entropies over the global number of tokens, and gradients are
    summed over all ranks, so nothing depends on how tokens are spread; a rank without any takes
    part like the others. A stop request on any rank ends the run on all after the current step,
    with a checkpoint.

    Args:
        config: the options; equal on all ranks, except `out`, where rank 0's counts.
        resume: whether to go on from the newest checkpoint of ``config.out``.
        stop: asks the run to stop, as SIGINT, SIGTERM and SIGHUP do; None for signals alone.

    Returns:
        The outcome, the same on every rank.

    Raises:
        ValueError: see `check_run`; and a run that fails that way on one rank does so on all.
        OSError: the folder cannot be written.
        TrainingError: the loss is not finite.
    """
    stop = stop or StopRequest()
    with joined(config) as world, ExitStack() as stack:
        leader = world.rank == 0
        config = _agree(config, world)
        lock = world.everywhere(lambda: RunLock(config.out, resume=resume) if leader else None)
        if lock:
            stack.enter_context(lock)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        start = _start(config, world) if resume else None
        corpus, _ = world.everywhere(
            lambda: check_run(config, world.size, local_ranks, resume=resume, start=start)
        )
        prints = world.gather(corpus.fingerprint)
        if len(set(prints)) > 1:
            other = next(r for r, text in enumerate(prints) if text != prints[0])
            raise ValueError(f"rank {other} reads other data than rank 0 in {corpus.description}")
        # The same weights on every rank and device: drawn on the CPU, from the seed alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = LongNet(
                config.model,
                exchange=config.exchange,
                backend=config.backend,
                checkpoint=config.checkpoint,
                checkpoint_blocks=config.checkpoint_blocks,
                chunk_rows=config.chunk_rows,
            )
        model.to(world.device)
        job = _Job(
            config=config,
            world=world,
            corpus=corpus,
            layout=config.sequence_layout(world.group_size),
            model=model,
        )
        optimizer = _optimizer(model, config)
        if start is not None:
            world.begin(f"loading {start.path.name}")
            found = start
            world.everywhere(lambda: found.load(model, optimizer))
        with _told_of_disk(config.out):
            return _train(job, optimizer, start, stop)


def _start(config: TrainConfig, world: World) -> Checkpoint:
    """The newest whole checkpoint of the run, as rank 0 finds it, on every rank.

    Raises:
        ValueError: there is none, or a rank cannot read it.
    """
    leader = world.rank == 0
    found = world.everywhere(lambda: checkpoint.newest(config.out) if leader else None)
    path = world.gather(found.path if found else None)[0]
    assert path is not None
    return world.everywhere(lambda: found or Checkpoint.open(path))


@contextmanager
def _told_of_disk(run: Path) -> Iterator[None]:
    """Files that cannot be written while a run goes on: one line, with the checkpoints there are.

    Raises:
        TrainingError: instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {run}: {os_error_text(error)}; {checkpoint.still_there(run)}"
        ) from error


def _train(
    job: _Job, optimizer: torch.optim.AdamW, resumed: Checkpoint | None, stop: StopRequest
) -> Outcome:
    config, world = job.config, job.world
    leader = world.rank == 0
    parameters = list(job.model.parameters())
    start = resumed.step if resumed else 0
    step, path, heldout = start, config.out, None
    with ExitStack() as stack:
        log = world.everywhere(lambda: RunLog(config.out, start=start) if leader else None)
        if log:
            stack.enter_context(log)
            log.write("config", step=start, ranks=world.size, **json.loads(config.to_json()))
        report = stack.enter_context(
            Report(steps=config.steps, start=start, every=max(config.steps // 20, 1), show=leader)
        )
        if resumed:
            for damaged in resumed.damaged:
                report.line(f"{one_line(damaged)}; going on from {resumed.path.name}")
        report.line(_introduction(job, parameters))
        stack.enter_context(OnFirstSignal(stop.ask))
        stopping = False
        while step < config.steps and not stopping:
            began = time.perf_counter()
            loss, norm = _step(job, optimizer, parameters, step)
            step += 1
            world.begin(f"step {step}, its metrics")
            bits, stopping, memory = _share_metrics(job, loss, stop.asked)
            seconds = time.perf_counter() - began
            _check_finite(step, bits)
            found = {
                "bits_per_byte": bits,
                "learning_rate": config.learning_rate_at(step - 1),
                "seconds": seconds,
                "tokens_per_second": config.batch_size * config.sequence_length / seconds,
                "peak_memory_bytes": max(memory),
            }
            if log:
                log.write("step", step=step, gradient_norm=norm.item(), **found)
            report.step(step, found)
            last = step == config.steps
            if last or (step % config.eval_every == 0 and not stopping):
                world.begin(f"step {step}, held-out evaluation")
                heldout = _evaluate(job)
                if log:
                    log.write("eval", step=step, bits_per_byte=heldout)
                report.line(f"step {step}: {heldout:.3f} bits/byte on held-out text")
            if last or stopping or step % config.save_every == 0:
                world.begin(f"step {step}, its checkpoint")
                path = checkpoint.save(
                    config, step, job.model, optimizer, job.corpus.fingerprint, world
                )
                if leader:
                    plot_losses(config.out)
    return Outcome(
        step=step,
        heldout_bits_per_byte=heldout,
        checkpoint=path,
        stopped=step < config.steps,
    )


def _check_finite(step: int, bits: float) -> None:
    if not math.isfinite(bits):
        raise TrainingError(f"the loss of step {step} is {bits}; a lower learning rate may help")


def _introduction(job: _Job, parameters: list[torch.nn.Parameter]) -> str:
    world = job.world
    groups = "" if world.data_size == 1 else f" in {world.data_size} sequence groups"
    return (
        f"{sum(p.numel() for p in parameters):,} parameters; "
        f"{world.size} rank{'s'[: world.size > 1]}{groups} on {world.device.type}; sequences of "
        f"{job.config.sequence_length:,} bytes from {len(job.corpus.train):,} bytes of "
        f"{job.corpus.description}"
    )


def _step(
    job: _Job, optimizer: torch.optim.AdamW, parameters: list[torch.nn.Parameter], step: int
) -> tuple[Tensor, Tensor]:
    """One update. Returns this rank's summed cross-entropy, and the global gradient norm.

    Nothing in it waits for a CUDA device.
    """
    config, world = job.config, job.world
    world.begin(f"step {step + 1}, forward and backward")
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    optimizer.zero_grad(set_to_none=True)
    windows = job.corpus.train_windows(
        config.sequence_length,
        seed=config.seed,
        step=step,
        rows=range(world.data_rank, config.batch_size, world.data_size),
    )
    loss = _summed_loss(job, windows)
    (loss / (config.batch_size * config.sequence_length)).backward()  # type: ignore[no-untyped-call]
    world.begin(f"step {step + 1}, the sum of gradients")
    world.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    return loss.detach(), norm


def _summed_loss(job: _Job, windows: list[Tensor]) -> Tensor:
    """Cross-entropy, in nats, summed over this rank's positions of these windows."""
    config, world = job.config, job.world
    inputs, labels = (
        part.to(world.device) for part in shard_windows(windows, job.layout, world.group_rank)
    )
    with _autocast(config, world.device):
        return job.model.loss(inputs, labels, group=world.group, layout=job.layout)


def _share_metrics(job: _Job, loss: Tensor, stop: bool) -> tuple[float, bool, list[int]]:
    """(Bits per byte of the step, whether any rank stops, peak bytes by rank), of all ranks."""
    config, world = job.config, job.world
    shared = torch.zeros(1 + world.size, dtype=torch.float64)
    shared[0] = float(stop)
    shared[1 + world.rank] = world.peak_memory()
    # On the host, before any waits for its device: where a rank is missing, this says so.
    stops, *memory = world.sum(shared).tolist()
    loss_sum = world.sum(loss.double()).item()
    tokens = config.batch_size * config.sequence_length
    return loss_sum / tokens / math.log(2), stops > 0, [int(m) for m in memory]


@torch.no_grad()
def _evaluate(job: _Job) -> float:
    """Bits per byte over the fixed held-out windows, spread over the sequence groups."""
    config, world = job.config, job.world
    starts = job.corpus.heldout_starts(config.sequence_length, config.eval_windows)
    mine = starts[world.data_rank :: world.data_size]
    rows = -(-config.batch_size // world.data_size)  # no more memory than a training step
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for first in range(0, len(mine), rows):
        windows = job.corpus.heldout_windows(config.sequence_length, mine[first : first + rows])
        total += _summed_loss(job, windows)
    world.meet()
    return world.sum(total).item() / (len(starts) * config.sequence_length) / math.log(2)


def _optimizer(model: LongNet, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices, not biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )


def _autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bfloat16")


def _agree(config: TrainConfig, world: World) -> TrainConfig:
    """Rank 0's folder, which may carry the time of day; all other options must be equal.

    Raises:
        ValueError: the options of some rank differ; the message names them.
    """
    shared = world.gather(config)
    options = [asdict(replace(other, out=config.out)) for other in shared]
    for rank, other in enumerate(options):
        different = [name for name in other if other[name] != options[0][name]]
        if different:
            name = different[0]
            raise ValueError(
                f"ranks 0 and {rank} have different options: {name} is {options[0][name]!r} and "
                f"{other[name]!r}"
            )
    return replace(config, out=shared[0].out)


def check_devices(config: TrainConfig, local_ranks: int) -> None:
    """Raise a `ValueError` unless this machine has a device for each of its ranks."""
    local_device(config.device, local_ranks - 1)
