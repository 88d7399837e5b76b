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
from .config import TrainConfig
from .curve import plot_losses
from .data import Corpus, shard_windows
from .errors import TrainingError, one_line, os_error_text
from .init_from import load_weights
from .introduction import what_is_read, what_is_trained
from .prepare import as_tokens, check_run
from .ranks import OnFirstSignal, StopRequest, World, joined, local_device
from .run_folder import Report, RunLock, RunLog
from .run_toml import write_toml
from .saving import Trained, save


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
    corpus: Corpus
    tokenizer: bytes | None
    layout: SequenceLayout
    model: LongNet
    read: list[str]


def run(
    config: TrainConfig,
    *,
    resume: bool = False,
    restartable: bool = False,
    stop: StopRequest | None = None,
) -> Outcome:
    """Train, on the ranks of this process's group or of torchrun, or on this one alone.

    Every rank of a sequence group sees the same sequences, each its own positions. The loss is the
    sum of all ranks' token cross-entropies over the global number of tokens, and gradients are
    summed over all ranks, so nothing depends on how tokens are spread; a rank without any takes
    part like the others. A stop request on any rank ends the run on all after the current step,
    with a checkpoint.

    Args:
        config: the options; equal on all ranks, except `out`, where rank 0's counts.
        resume: whether to go on from the newest checkpoint of ``config.out``.
        restartable: as of `check_run`.
        stop: asks the run to stop, as SIGINT, SIGTERM and SIGHUP do, and a closed pipe of standard
            output; None for these alone.

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
        config = _agree(config, resume, world)
        lock = world.everywhere(lambda: RunLock(config.out, resume=resume) if leader else None)
        if lock:
            stack.enter_context(lock)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        start = _start(config, world) if resume else None
        text, _ = world.everywhere(
            lambda: check_run(
                config, world.size, local_ranks, start=start, resume=resume, restartable=restartable
            )
        )
        prints = world.gather(text.fingerprint)
        if len(set(prints)) > 1:
            other = next(rank for rank, found in enumerate(prints) if found != prints[0])
            raise ValueError(f"rank {other} reads other data than rank 0 in {text.description}")
        corpus, tokenizer = as_tokens(config, text, start, world)
        read = what_is_read(text, config)
        del text  # unless it is the corpus, it would stay beside it
        # The same weights on every rank and device: drawn on the CPU, from the seed alone.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = LongNet(
                config.model,
                exchange=config.exchange,
                backend=config.backend,
                checkpoint=config.activation_checkpoint,
                checkpoint_blocks=config.activation_checkpoint_blocks,
                chunk_rows=config.chunk_rows,
            )
        model.to(world.device)
        job = _Job(
            config=config,
            world=world,
            corpus=corpus,
            tokenizer=tokenizer,
            layout=config.sequence_layout(world.group_size),
            model=model,
            read=read,
        )
        optimizer = _optimizer(model, config)
        if start is not None:
            world.begin(f"loading {start.path.name}")
            found = start
            world.everywhere(lambda: found.load(model, optimizer))
        elif config.init_from is not None:
            world.begin("loading the weights to begin with")
            load_weights(config, model, world)
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
        log = world.everywhere(lambda: _open_log(config, world, start) if leader else None)
        if log:
            stack.enter_context(log)
            log.write("config", step=start, ranks=world.size, **json.loads(config.to_json()))
        report = stack.enter_context(
            Report(steps=config.steps, start=start, show=leader, unread=stop.ask)
        )
        for line in _introduction(job, resumed, parameters):
            report.line(line)
        stack.enter_context(OnFirstSignal(stop.ask))
        stopping = False
        while step < config.steps and not stopping:
            began = time.perf_counter()
            loss, norm = _step(job, optimizer, parameters, step)
            step += 1
            world.begin(f"step {step}, its metrics")
            mean, bits, stopping, memory = _share_metrics(job, step - 1, loss, stop.asked)
            seconds = time.perf_counter() - began
            _check_finite(step, bits)
            found = {
                "loss": mean,
                "bits_per_byte": bits,
                "learning_rate": config.learning_rate_at(step - 1),
                "seconds": seconds,
                "tokens_per_second": config.batch_size * config.seq_len / seconds,
                "peak_memory_bytes": max(memory),
            }
            if log:
                log.write("step", step=step, gradient_norm=norm.item(), **found)
            report.step(step, found)
            last = step == config.steps
            if last or (step % config.eval_every == 0 and not stopping):
                world.begin(f"step {step}, held-out evaluation")
                mean, heldout = _evaluate(job)
                if log:
                    log.write("eval", step=step, loss=mean, bits_per_byte=heldout)
                report.line(
                    f"step {step}: loss {mean:.3f}, {heldout:.3f} bits/byte on held-out text"
                )
            if last or stopping or step % config.save_every == 0:
                world.begin(f"step {step}, its checkpoint")
                path = save(config, _trained(job, step, optimizer), world)
                if leader:
                    plot_losses(config.out)
    return Outcome(
        step=step,
        heldout_bits_per_byte=heldout,
        checkpoint=path,
        stopped=step < config.steps,
    )


def _open_log(config: TrainConfig, world: World, start: int) -> RunLog:
    """Rank 0's log of the run, and its options as TOML beside it."""
    log = RunLog(config.out, start=start, tensorboard=config.tensorboard)
    write_toml(config, ranks=world.size)
    return log


def _trained(job: _Job, step: int, optimizer: torch.optim.AdamW) -> Trained:
    return Trained(
        step=step,
        model=job.model,
        optimizer=optimizer,
        fingerprint=job.corpus.fingerprint,
        tokenizer=job.tokenizer,
    )


def _check_finite(step: int, bits: float) -> None:
    if not math.isfinite(bits):
        raise TrainingError(f"the loss of step {step} is {bits}; a lower learning rate may help")


def _introduction(
    job: _Job, resumed: Checkpoint | None, parameters: list[torch.nn.Parameter]
) -> Iterator[str]:
    if resumed:
        for damaged in resumed.damaged:
            yield f"{one_line(damaged)}; going on from {resumed.path.name}"
        yield f"resumed from step {resumed.step:,}: {resumed.path}"
    elif job.config.init_from is not None:
        yield f"begun with the weights of {job.config.init_from}"
    yield from job.read
    number = sum(parameter.numel() for parameter in parameters)
    yield what_is_trained(number, job.corpus, job.config, job.world)


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
    loss = _summed_loss(job, _windows(job, step))
    (loss / (config.batch_size * config.seq_len)).backward()  # type: ignore[no-untyped-call]
    world.begin(f"step {step + 1}, the sum of gradients")
    world.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    return loss.detach(), norm


def _windows(job: _Job, step: int) -> list[Tensor]:
    """The windows of this rank's sequence group in a step."""
    config, world = job.config, job.world
    return job.corpus.train_windows(
        config.seq_len,
        seed=config.seed,
        step=step,
        rows=range(world.data_rank, config.batch_size, world.data_size),
    )


def _summed_loss(job: _Job, windows: list[Tensor]) -> Tensor:
    """Cross-entropy, in nats, summed over this rank's positions of these windows."""
    config, world = job.config, job.world
    inputs, labels = (
        part.to(world.device) for part in shard_windows(windows, job.layout, world.group_rank)
    )
    with _autocast(config, world.device):
        return job.model.loss(inputs, labels, group=world.group, layout=job.layout)


def _share_metrics(
    job: _Job, step: int, loss: Tensor, stop: bool
) -> tuple[float, float, bool, list[int]]:
    """Of all ranks: (loss in nats per token, bits per byte, whether any stops, peak bytes by rank).

    Bits per byte are all nats over all bytes of the text that the labels spell: of models with
    other tokens they can be compared.
    """
    config, world = job.config, job.world
    shared = torch.zeros(2 + world.size, dtype=torch.float64)
    shared[0] = float(stop)
    if world.group_rank == 0:
        shared[1] = job.corpus.count_bytes(_windows(job, step))
    shared[2 + world.rank] = world.peak_memory()
    # On the host, before any waits for its device: where a rank is missing, this says so.
    stops, num_bytes, *memory = world.sum(shared).tolist()
    nats = world.sum(loss.double()).item()
    mean = nats / (config.batch_size * config.seq_len)
    return mean, nats / num_bytes / math.log(2), stops > 0, [int(m) for m in memory]


@torch.no_grad()
def _evaluate(job: _Job) -> tuple[float, float]:
    """(Loss in nats per token, bits per byte) of the fixed held-out windows.

    They are spread over the sequence groups.
    """
    config, world = job.config, job.world
    starts = job.corpus.heldout_starts(config.seq_len, config.eval_windows)
    mine = starts[world.data_rank :: world.data_size]
    rows = -(-config.batch_size // world.data_size)  # no more memory than a training step
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for first in range(0, len(mine), rows):
        windows = job.corpus.heldout_windows(config.seq_len, mine[first : first + rows])
        total += _summed_loss(job, windows)
    num_bytes = job.corpus.count_bytes(
        job.corpus.heldout_windows(config.seq_len, starts)  # all of them, on every rank
    )
    world.meet()
    nats = world.sum(total).item()
    return nats / (len(starts) * config.seq_len), nats / num_bytes / math.log(2)


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
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16")


def _agree(config: TrainConfig, resume: bool, world: World) -> TrainConfig:
    """Rank 0's folder, which may carry the time of day; all other options must be equal.

    Raises:
        ValueError: the options of some rank differ; the message names them.
    """
    if len(set(found := world.gather(resume))) > 1:
        lost = f"rank {found.index(False)} finds no checkpoint in {config.out}, others do"
        raise ValueError(f"{lost}: it must be on a file system that all hosts share")
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
