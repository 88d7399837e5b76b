"""`rda plan --decode`: what a KV cache keeps, its bytes and what a step reads, by brute force."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import patterns
from typer.testing import CliRunner

from ring_dilated_attention import DilatedKVCache, DilatedPattern
from ring_dilated_attention.cli import app
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import costs

LONGNET = ["--segment-lengths=2048,4096,8192,16384,32768", "--dilation-rates=1,2,4,6,12"]
SHAPES: dict[str, Any] = {
    # options of the pattern, as the library takes them; positions; KV heads; documents
    "segments": (([8, 16], [1, 3]), {}, 45, 5, None),
    "document": (([None, 8], [4, 1]), {}, 45, 3, None),
    "blocked": (([5, 13], [2, 7]), {"head_offsets": "blocked"}, 30, 6, None),
    "split": (([7, None, 20], [3, 2, 5]), {"head_branches": "split"}, 33, 4, None),
    "rates larger than segments": (([3, 50], [9, 60]), {}, 100, 12, None),
    "rates larger than the text": (([None, 50], [9, 60]), {}, 4, 12, None),
    "one position": (([8, None], [1, 2]), {}, 1, 2, None),
    "segments not ended": (([64, 90], [4, 3]), {}, 50, 2, None),
    "a segment that ends": (([8, 16], [1, 2]), {}, 48, 2, None),
    "documents": (([8, None], [1, 2]), {}, 50, 2, [0, 7, 50]),
}


def members(pattern, branch, offset, segment_start, stop):
    """Positions of a segment that a head is shown, before `stop`."""
    length, rate = pattern.branches[branch]
    end = stop if length is None else min(stop, segment_start + length)
    return [p for p in range(segment_start, end) if p >= segment_start + offset
            and (p - segment_start - offset) % rate == 0]  # fmt: skip


def shown_to(pattern, branch, offset, query):
    """Keys that the query is shown, itself too."""
    length, _ = pattern.branches[branch]
    start = 0 if length is None else query // length * length
    found = members(pattern, branch, offset, start, query + 1)
    return found if query in found else []


def brute_force(pattern, heads, length):
    """(heads, kept, steps, shown) of each branch, position by position."""
    found = []
    for branch, (segment, rate) in enumerate(pattern.branches):
        steps = segment if segment is not None and segment <= length else min(rate, length)
        own = pattern.heads(branch, heads)
        ahead = range(length, length + max(rate, segment or 0) + 1)
        kept = sum(
            len({k for q in ahead for k in shown_to(pattern, branch, offset, q) if k < length})
            for _, offset in own
        )
        newest = range(length - steps, length)
        shown = sum(len(shown_to(pattern, branch, o, q)) for _, o in own for q in newest)
        found.append((len(own), kept, steps, shown))
    return found


@settings(max_examples=100, deadline=None)
@given(patterns(), st.integers(1, 5), st.integers(1, 150))
def test_what_is_kept_and_shown(pattern, heads, length):
    uses = costs.cache_use(pattern, heads, length)
    assert [use.index for use in uses] == list(range(len(pattern.branches)))
    found = [(use.heads, use.kept, use.steps, use.shown) for use in uses]
    assert found == brute_force(pattern, heads, length)


def rda(*words):
    return CliRunner().invoke(app, ["plan", "--decode", *words])


def options_of(shape):
    (lengths, rates), options, length, heads, documents = shape
    named = {f"--{name.replace('_', '-')}={value}" for name, value in options.items()}
    return [
        f"--segment-lengths={','.join('all' if w is None else str(w) for w in lengths)}",
        f"--dilation-rates={','.join(map(str, rates))}", f"--seq-len={length}",
        f"--num-heads={2 * heads}", f"--num-kv-heads={heads}", "--head-dim=8", "--batch-size=3",
        "--dtype=fp32", *named,
        *([] if documents is None else [f"--documents={','.join(map(str, documents))}"]),
    ]  # fmt: skip


def cache_bytes(pattern, heads, length, sharded, ends):
    cache = DilatedKVCache(
        pattern, 3, heads, 8, max_length=length, dtype=torch.float32, group=ends, sharded=sharded
    )
    return cache.nbytes


@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_of_every_shape(name, tmp_path):
    branches, options, length, heads, documents = SHAPES[name]
    pattern = DilatedPattern(*branches, **options)
    file = tmp_path / "found.json"
    done = rda(*options_of(SHAPES[name]), "--ranks=3", f"--json={file}")
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    length = length if documents is None else documents[-1] - documents[-2]
    assert found["length"] == length
    wanted = brute_force(pattern, heads, length)
    shown = 0
    for branch, (count, kept, steps, rows) in zip(found["branches"], wanted, strict=True):
        assert (branch["kv_heads"], branch["kept_rows"]) == (count, kept)
        assert branch["mean_rows_shown"] == pytest.approx(rows / (max(count, 1) * steps))
        assert branch["kept_rows"] <= branch["slots_per_head"] * count
        shown += rows / steps
    assert found["kept_rows"] == sum(kept for _, kept, _, _ in wanted)
    assert found["mean_rows_shown"] == pytest.approx(shown / heads)
    assert found["mean_read_bytes"] == round(shown * 2 * 3 * 8 * 4)
    assert found["grows"] == (None in pattern.segment_lengths)
    sizes = found["rank_bytes"]
    row = 2 * 3 * 8 * 4  # bytes of key and value of a batch of 3
    assert sizes["all_rows_whole"] == length * heads * row
    assert sizes["all_rows_shared"] == -(-length // 3) * heads * row
    for key, sharded in (("whole", False), ("shared", True)):
        real = run_loopback(3, partial(cache_bytes, pattern, heads, length, sharded))
        assert real == [sizes[key]] * 3


def rows_under(title, output):
    lines = output[output.index(title) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("─"))
    return [line.split() for line in lines[start + 1 :]]


def test_longnet_keeps_as_much_after_a_million_tokens_as_after_a_billion(tmp_path):
    file = tmp_path / "found.json"
    for length in ("1000000", "1M", "1024M"):
        done = rda(*LONGNET, f"--seq-len={length}", "--num-heads=12", f"--json={file}")
        assert done.exit_code == 0, done.output
        assert "growth: none beyond the longest segment, 32,768 positions" in done.output
        slots = [row[3] for row in rows_under("Rows of a head", done.output)[:5]]
        assert slots == ["2,048", "2,048", "2,048", "2,731", "2,731"]
        sizes = json.loads(file.read_text())["rank_bytes"]
        assert sizes["whole"] == 2 * 12 * 11_606 * 64 * 2
        assert sizes["whole"] <= 1.05 * 2 * 12 * 11_600 * 64 * 2
        # A million is inside of a segment; the others are where every segment ends.
        assert ("kept: nothing just now" in done.output) == (length != "1000000")


def test_tables_have_the_numbers_of_the_document(tmp_path):
    file = tmp_path / "found.json"
    done = rda(
        "--seq-len=1000", "--segment-lengths=64,all", "--dilation-rates=1,16", "--num-heads=12",
        "--head-dim=64", "--ranks=4", f"--json={file}",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    rows = rows_under("Rows of a head", done.output)
    assert rows[0] == ["64", "1", "12", "64", "40.0", "32.5"]
    assert rows[1] == ["document", "16", "12", "63", "62.7", "3.9"]
    assert rows[3] == ["all", "branches", "12", "127", "102.7", "36.4"]
    for branch, row in zip(found["branches"], rows, strict=False):
        assert branch["slots_per_head"] == int(row[3])
        assert f"{branch['kept_rows'] / 12:.1f}" == row[4]
        assert f"{branch['mean_rows_shown']:.1f}" == row[5]
    sizes = found["rank_bytes"]
    table = rows_under("Keys and values", done.output)
    for row, kind in zip(table, ("whole", "shared"), strict=False):
        own, dense, ratio = (cell.replace(",", "") for cell in row[-3:])
        assert float(own) == pytest.approx(sizes[kind] / 1024, rel=1e-3)
        assert float(dense) == pytest.approx(sizes[f"all_rows_{kind}"] / 1024, rel=1e-3)
        assert f"{sizes[kind] / sizes[f'all_rows_{kind}']:.4f}" == ratio
    assert "growth: with the text: n / 16 rows a head for n positions, of (document, 16)" in (
        done.output
    )


def test_generation_is_causal_whatever_is_asked(tmp_path):
    for words in ([], ["--causal"]):
        file = tmp_path / "found.json"
        assert rda("--seq-len=9", *words, f"--json={file}").exit_code == 0
        assert json.loads(file.read_text())["options"]["causal"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiles"], "--tiles is about what ranks compute"),
        (["--check"], "--check is about what ranks compute"),
        (["--show-ranks=0"], "--show-ranks is about what ranks compute"),
        (["--show-ranks=all"], "--show-ranks is about what ranks compute"),
        (["--seq-len=0"], "--seq-len must be >= 1, got 0"),
        (["--ranks=0"], "--ranks must be >= 1, got 0"),
        (["--documents=0,5"], "documents must rise from 0 to the sequence length 9"),
        (["--num-heads=4", "--num-kv-heads=3"], "multiple of num_kv_heads; got 4 and 3"),
        (["--dtype=int4"], "--dtype must be one of bf16"),
        (["--batch-size=0"], "--batch-size must be >= 1, got 0"),
    ],
)
def test_bad_options_are_one_line(words, message):
    done = rda("--seq-len=9", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
