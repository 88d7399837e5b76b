"""What a training step of the language model holds: O(rows), two residual streams a layer.

Sizes are in units of one residual stream, (rows, embed_dim) in the dtype of the model.
"""

import itertools

import pytest
import torch
from support.plans import forget_plans
from torch.profiler import ProfilerActivity, profile, record_function

from ring_dilated_attention.engine import BACKWARD_WORKSPACE, TileCall
from ring_dilated_attention.nn import LongNet, LongNetConfig

WIDTH, HEADS, CHUNK = 256, 4, 256
ROWS = (2048, 4096)
HEAD_DIM = WIDTH // HEADS
UNIT = WIDTH * 4  # bytes of a row in float32
LSE = HEADS * 4 / UNIT
ANGLES = 2 * HEAD_DIM * 4 / UNIT  # cos and sin, as wide as a head, once a model

# Backward of attention: gradients of the block's two parts that wait, query, key, value and their
# gradients, and what kernels allocate; the rest is chunks.
BACKWARD = 2 + 3 + 3 + BACKWARD_WORKSPACE


def measure(rows, layers, checkpoint, chunk_rows, blocks):
    """Bytes allocated when forward ends, and at the peak of the step."""
    config = LongNetConfig(
        num_layers=layers,
        embed_dim=WIDTH,
        num_heads=HEADS,
        ffn_dim=4 * WIDTH,
        segment_lengths=(128, 256, None),
        dilation_rates=(1, 2, 64),
    )
    model = LongNet(config, checkpoint=checkpoint, checkpoint_blocks=blocks, chunk_rows=chunk_rows)
    tokens = torch.zeros(1, rows, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = model.loss(tokens, tokens)
        with record_function("backward"):
            loss.backward()
    events = list(profiled.profiler.kineto_results.events())
    (began,) = (e.start_ns() for e in events if e.name() == "backward")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    kept = sum(size for time, size in changes if time < began)
    return kept, max(itertools.accumulate(size for _, size in changes))


def slopes(layers, checkpoint="keep_attention", chunk_rows=CHUNK, blocks=1):
    """(kept, peak) in units: what a further row adds, over the bytes of a row."""
    few, many = (measure(rows, layers, checkpoint, chunk_rows, blocks) for rows in ROWS)
    return [(b - a) / (ROWS[1] - ROWS[0]) / UNIT for a, b in zip(few, many, strict=True)]


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    """At these sizes the least that kernels may allocate would be all there is."""

    def share_of_query(call, query, default, row_bytes):
        return default * query.nbytes / row_bytes

    monkeypatch.setattr(TileCall, "most_rows", share_of_query)
    forget_plans()  # which keep their slices


def test_a_layer_keeps_its_input_and_the_results_of_attention():
    (kept, peak), (kept_of_more, peak_of_more) = slopes(2), slopes(4)
    of_a_layer = 2 + LSE
    assert (kept_of_more - kept) / 2 == pytest.approx(of_a_layer, abs=0.02)
    assert (peak_of_more - peak) / 2 == pytest.approx(of_a_layer, abs=0.02)
    # Beside the layers: what enters the final norm.
    assert kept == pytest.approx(2 * of_a_layer + 1 + ANGLES, abs=0.05)
    assert peak == pytest.approx(2 * of_a_layer + ANGLES + BACKWARD, abs=0.1)


def test_the_input_of_one_block_in_three():
    kept, peak = slopes(6, blocks=3)
    assert kept == pytest.approx(6 * (1 + LSE) + 2 + 1 + ANGLES, abs=0.05)
    # Of the three blocks under way all inputs are there.
    assert peak == pytest.approx(6 * (1 + LSE) + 1 + 3 + ANGLES + BACKWARD, abs=0.6)


def test_chunks_and_checkpoints_are_what_saves_it():
    """So that the test above measures what it says."""
    assert slopes(2, "none", None)[0] > 2 * 14
    assert slopes(2, "keep_attention", None)[1] > slopes(2)[1] + 8
    assert slopes(2, "full")[0] == pytest.approx(2 * 1 + 1 + ANGLES, abs=0.05)
