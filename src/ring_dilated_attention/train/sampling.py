"""What `rda sample` does: draw tokens that continue a prompt, as bytes and as text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_seed
from ..nn import LongNet
from ..pattern import check_positive_int
from .checkpoint import Checkpoint
from .errors import one_line
from .plain_weights import weights_at
from .tokenizer import NUM_BYTES

FEW_PARAMETERS = 4_000_000
"""Of models with fewer, an operation on one token takes a few microseconds, which a second thread
does not shorten; where other programs use the processor, waiting for it takes milliseconds."""


def sample_bytes(
    path: Path,
    prompt: bytes,
    *,
    told: Callable[[str], None] = lambda _: None,
    count: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    **cut: Any,
) -> Iterator[bytes]:
    """Bytes that continue a prompt, those of one token at a time.

    The prompt is read once, then every token alone, with a KV cache of what the pattern shows. A
    text longer than those of the training goes on in the same way: the tokens are those that the
    whole text would give, at positions that the model has not been trained on.

    Args:
        path: a checkpoint, a run, whose newest checkpoint is taken, or plain weights.
        prompt: at least one byte.
        count: how many tokens to give; those of a model of bytes are bytes.
        temperature: logits are divided by it; 0 takes the most likely token always.
        seed: of the draws, from 0 to 2**62 - 1.
        cut: ``top_k``, ``top_p`` or both, of `LongNet.generate`: which tokens to draw among.
        told: called with one line for every newer checkpoint of the run that is damaged.

    Returns:
        An iterator; the weights and the prompt have been read when this returns.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, the prompt is empty, or there are no
            usable weights, or their tokenizer does not spell the prompt.
    """
    check_positive_int("count", count)
    if not prompt:
        raise ValueError("the prompt must have at least one byte; got an empty one")
    check_seed(seed)
    found = weights_at(path)
    if isinstance(found, Checkpoint):
        for damaged in found.damaged:
            told(f"{one_line(damaged)}; taking {found.path.name}")
    tokenizer = found.tokenizer()
    vocabulary = found.model.vocab_size
    if tokenizer is None:
        spelled: Sequence[bytes | None] = [bytes([byte]) for byte in range(NUM_BYTES)]
        tokens = list(prompt)
    else:
        spelled = tokenizer.spelled
        (tokens,) = tokenizer.encode([prompt])
    if vocabulary != len(spelled):
        raise ValueError(
            f"{found.path} does not fit its tokenizer: the model has {vocabulary} tokens, the "
            f"tokenizer {len(spelled)}"
        )
    model = LongNet(found.model)
    found.load_weights(model)
    model.eval()
    stream = model.stream(
        torch.tensor([tokens], dtype=torch.int64),
        count,
        temperature=temperature,
        # Numbers without a token are never drawn, and an empty one would spell nothing.
        allowed=torch.tensor([bool(text) for text in spelled]),
        seed=seed,
        **cut,
    )
    if sum(parameter.numel() for parameter in model.parameters()) < FEW_PARAMETERS:
        stream = _on_one_thread(stream)
    return (spelled[int(number)] or b"" for number in stream)


def _on_one_thread(tokens: Iterator[Tensor]) -> Iterator[Tensor]:
    """Tokens, each computed by one thread: for a small model, other threads take longer to wake."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from tokens
    finally:
        torch.set_num_threads(before)


def decoded(stream: Iterable[bytes]) -> Iterator[str]:
    """Bytes as text as soon as they make characters; what is not UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in stream:
        if text := decoder.decode(part):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
