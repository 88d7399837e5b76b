"""What `rda sample` does: draw tokens that continue a prompt, as bytes and as text."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..checks import check_seed
from ..nn import LongNet
from ..pattern import check_positive_int
from . import checkpoint
from .errors import one_line
from .tokenizer import NUM_BYTES


def sample_bytes(
    path: Path,
    prompt: bytes,
    *,
    told: Callable[[str], None] = lambda _: None,
    count: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[bytes]:
    """Bytes that continue a prompt, those of one token at a time.

    The model reads at most the last ``seq_len`` tokens, the length it was trained on.

    Args:
        path: a checkpoint, or a run, whose newest checkpoint is taken.
        prompt: at least one byte.
        count: how many tokens to give; those of a model of bytes are bytes.
        temperature: logits are divided by it; 0 takes the most likely token always.
        top_k: draw among this many most likely tokens only; None means all.
        seed: of the draws, from 0 to 2**62 - 1.
        told: called with one line for every newer checkpoint of the run that is damaged.

    Returns:
        An iterator; the checkpoint has been read when this returns.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, the prompt is empty, or there is no usable
            checkpoint, or its tokenizer does not spell the prompt.
    """
    check_positive_int("count", count)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and >= 0; got {temperature!r}")
    if not prompt:
        raise ValueError("the prompt must have at least one byte; got an empty one")
    check_seed(seed)
    found = checkpoint.newest(path)
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
    if top_k is not None and check_positive_int("top_k", top_k) > vocabulary:
        raise ValueError(f"top_k must be at most {vocabulary}; got {top_k}")
    model = LongNet(found.model)
    found.load(model)
    model.eval()
    draw = partial(
        _drawn,
        # Numbers without a token are never drawn, and an empty one would spell nothing.
        empty=torch.tensor([not text for text in spelled]),
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    numbers = _continued(model, tokens, draw, count=count, context=found.config.seq_len)
    return (spelled[number] or b"" for number in numbers)


def _continued(
    model: LongNet,
    prompt: list[int],
    draw: Callable[[Tensor], Tensor],
    *,
    count: int,
    context: int,
) -> Iterator[int]:
    """Tokens, by number, that continue those of a prompt."""
    tokens = torch.tensor([prompt], dtype=torch.int64)
    for _ in range(count):
        tokens = tokens[:, -context:]
        with torch.no_grad():
            token = draw(model(tokens)[0, -1].double())
        tokens = torch.cat((tokens, token[None]), dim=1)
        yield int(token)


def _drawn(
    logits: Tensor,
    *,
    empty: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Tensor:
    """A token drawn by its logits, shape (vocabulary,), but none that is empty: shape (1,)."""
    logits = logits.masked_fill(empty, -torch.inf)
    if temperature == 0:
        return logits.argmax().view(1)
    if top_k is not None:
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def decoded(stream: Iterable[bytes]) -> Iterator[str]:
    """Bytes as text as soon as they make characters; what is not UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in stream:
        if text := decoder.decode(part):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
