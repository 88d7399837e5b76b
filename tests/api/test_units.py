"""Numbers as text and back."""

import pytest

from ring_dilated_attention import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.in_bytes, 0, "0 B"),
        (units.in_bytes, 1023, "1,023 B"),
        (units.in_bytes, 1.56 * 2**30, "1.56 GiB"),
        (units.in_flop, 3.44e12, "3.44 TFLOP"),
        (units.in_seconds, 0, "0 s"),
        (units.in_seconds, 72.2e-3, "72.2 ms"),
        (units.in_seconds, 37.1, "37.1 s"),
        (units.in_seconds, 725, "12 min 5 s"),
        (units.in_seconds, 7260, "2 h 1 min"),
        (units.short_count, 8192, "8K"),
        (units.short_count, 2**30, "1G"),
        (units.short_count, 10_001, "10001"),
    ],
)
def test_units_write(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("4,096", 4096), ("4k", 4096), ("3M", 3 << 20), ("1G", 1 << 30)],
)
def test_parse_count_reads(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1T", "all", "²"])
def test_parse_count_refuses(text):
    with pytest.raises(ValueError, match="is not a number of positions such as"):
        units.parse_count(text)
