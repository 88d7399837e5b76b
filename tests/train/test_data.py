"""Files to bytes to windows to shards."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.train.data import HEAD_BYTES, ByteCorpus, shard_windows, stdlib_sources


def write(folder: Path, **texts: bytes) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def all_bytes(corpus: ByteCorpus) -> bytes:
    return bytes(corpus.train.tolist()) + bytes(corpus.heldout.tolist())


def test_default_is_the_standard_library_without_installed_packages() -> None:
    files = list(stdlib_sources())
    names = {file.name for file in files}
    assert {"os.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert all(name.endswith(".py") for name in names)
    assert [file.name for file in files] == sorted(names)


def test_folder_order_does_not_depend_on_creation_order(tmp_path: Path) -> None:
    texts = {f"f{i}": bytes([i]) * 40 for i in range(1, 60)}
    first = ByteCorpus.load([write(tmp_path / "a", **texts)])
    second = ByteCorpus.load([write(tmp_path / "b", **dict(reversed(texts.items())))])
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.train, second.train)
    changed = ByteCorpus.load([write(tmp_path / "c", **{**texts, "f1": b"x" * 40})])
    assert changed.fingerprint != first.fingerprint


def test_whole_files_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{i}": bytes([i]) * 40 for i in range(1, 200)})
    corpus = ByteCorpus.load([tmp_path])
    train, heldout = set(corpus.train.tolist()), set(corpus.heldout.tolist())
    assert not train & heldout
    assert train | heldout == set(range(1, 200))
    assert 0.05 <= len(corpus.heldout) / (199 * 40) <= 0.1
    assert corpus.num_files == 199


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    corpus = ByteCorpus.load([path])
    assert all_bytes(corpus) == bytes(range(100))
    assert corpus.heldout.tolist() == [95, 96, 97, 98, 99]


def test_more_can_be_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    assert len(ByteCorpus.load([path], heldout_fraction=0.3).heldout) == 30
    write(tmp_path / "many", **{f"f{i}": bytes([i]) * 40 for i in range(1, 200)})
    corpus = ByteCorpus.load([tmp_path / "many"], heldout_fraction=0.3)
    assert 0.3 <= len(corpus.heldout) / (199 * 40) <= 0.6


def test_folders_skip_binary_hidden_and_installed_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        sub__text=b"yes" * 20,
        binary=b"no\0no",
        late=b"no" * HEAD_BYTES + b"\0",
        sub__empty=b"",
    )
    for skipped in (".hidden", ".git/x", "site-packages/x", "__pycache__/x"):
        (tmp_path / skipped).parent.mkdir(exist_ok=True)
        (tmp_path / skipped).write_bytes(b"no")
    (tmp_path / "there").symlink_to(tmp_path / "sub")
    corpus = ByteCorpus.load([tmp_path])
    assert all_bytes(corpus) == b"yes" * 20
    assert set(corpus.skipped) == {  # by names that tell two of them apart
        (".hidden", "hidden file"),
        (".git", "hidden folder"),
        ("site-packages", "cache or package folder"),
        ("__pycache__", "cache or package folder"),
        ("there", "link to a folder"),
        ("binary", "binary file"),
        ("late", "binary file"),
        ("sub/empty", "empty file"),
    }
    named = ByteCorpus.load([tmp_path / "binary"])  # as it is
    assert all_bytes(named) == b"no\0no"


def test_a_file_reached_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, text=b"once" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "text")
    corpus = ByteCorpus.load([tmp_path, tmp_path / "text"])
    assert all_bytes(corpus) == b"once" * 10


def test_missing_path_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere: No such file"):
        ByteCorpus.load([tmp_path / "nowhere"])


def test_broken_link_in_a_folder_names_it(tmp_path: Path) -> None:
    write(tmp_path, text=b"text")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"cannot read .*broken: No such file"):
        ByteCorpus.load([tmp_path])


@pytest.mark.parametrize("unreadable", ["file", "folder"])
def test_unreadable_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    write(tmp_path, sub__file=b"text")
    path = tmp_path / "sub" if unreadable == "folder" else tmp_path / "sub" / "file"
    path.chmod(0)
    try:
        if os.geteuid() == 0:  # root reads everything, so let the system calls refuse

            def refuse(*args: object, **options: object) -> bytes:
                raise PermissionError(13, "Permission denied", str(path))

            monkeypatch.setattr(Path, "read_bytes", refuse)
            if unreadable == "folder":
                monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(ValueError, match=rf"cannot read {path}: Permission denied"):
            ByteCorpus.load([tmp_path])
    finally:
        path.chmod(0o700)


def test_empty_data_names_the_path(tmp_path: Path) -> None:
    write(tmp_path, empty=b"")
    for path in (tmp_path, tmp_path / "empty"):
        with pytest.raises(ValueError, match=rf"no text to train on in {path}"):
            ByteCorpus.load([path])


def test_folders_without_text_say_what_was_skipped_and_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no text to train on in .*: it has no files$"):
        ByteCorpus.load([tmp_path])
    write(tmp_path, a="text".encode("utf-16"), b=b"")
    found = re.escape(
        f"in {tmp_path}: skipped a (binary file), b (empty file); a file with null bytes, as "
        "UTF-16 has, is binary: convert it to UTF-8"
    )
    with pytest.raises(ValueError, match=found):
        ByteCorpus.load([tmp_path])
    (tmp_path / "a").unlink()
    write(tmp_path, **dict.fromkeys("cdef", b""))
    with pytest.raises(ValueError, match=r"skipped b \(empty file\), c .*, d .* and 2 more$"):
        ByteCorpus.load([tmp_path])


def test_too_short_data_says_which_split_and_how_long(tmp_path: Path) -> None:
    path = write(tmp_path, text=bytes(range(200))) / "text"
    corpus = ByteCorpus.load([path])
    corpus.check_window(9)
    with pytest.raises(ValueError, match=rf"10 bytes .* 11 bytes of held-out text; {path} has 10"):
        corpus.check_window(10)
    with pytest.raises(ValueError, match=r"need 191 bytes of training text"):
        corpus.check_window(190)


def test_windows_depend_on_seed_step_and_row_alone(tmp_path: Path) -> None:
    corpus = ByteCorpus.load([write(tmp_path, text=os.urandom(5000)) / "text"])
    windows = corpus.train_windows(64, seed=1, step=2, rows=range(6))
    assert [window.shape for window in windows] == [(65,)] * 6
    for row in range(6):
        (alone,) = corpus.train_windows(64, seed=1, step=2, rows=[row])
        assert torch.equal(alone, windows[row])
    others = [
        corpus.train_windows(64, seed=seed, step=step, rows=range(6))
        for seed, step in ((2, 2), (1, 3))
    ]
    assert not any(torch.equal(torch.stack(windows), torch.stack(other)) for other in others)


def test_every_start_can_be_drawn(tmp_path: Path) -> None:
    corpus = ByteCorpus.load([write(tmp_path, text=bytes(range(100))) / "text"])
    windows = corpus.train_windows(90, seed=0, step=0, rows=range(200))
    assert {int(window[0]) for window in windows} == set(
        range(5)
    )  # 95 bytes hold windows of 91 at 0 to 4


def test_heldout_windows_are_disjoint_and_fixed(tmp_path: Path) -> None:
    corpus = ByteCorpus.load([write(tmp_path, text=os.urandom(4000)) / "text"])
    assert len(corpus.heldout) == 200
    starts = corpus.heldout_starts(19, 4)
    assert starts == [0, 38, 95, 133]
    assert corpus.heldout_starts(19, 1000) == list(range(0, 190, 19))
    windows = corpus.heldout_windows(19, starts)
    assert [window.shape for window in windows] == [(20,)] * 4
    assert windows[1].tolist() == corpus.heldout[38:58].tolist()


@pytest.mark.parametrize("make", [SequenceLayout.contiguous, SequenceLayout.zigzag])
@pytest.mark.parametrize(("length", "world_size"), [(13, 1), (13, 2), (16, 4), (5, 4), (3, 7)])
def test_labels_follow_inputs_across_rank_borders(
    make: Callable[[int, int], SequenceLayout], length: int, world_size: int
) -> None:
    layout = make(length, world_size)
    windows = torch.stack([torch.arange(length + 1), 100 + torch.arange(length + 1)])
    windows = windows.to(torch.uint8)  # as bytes come
    shards = [shard_windows(list(windows), layout, rank) for rank in range(world_size)]
    for rank, (inputs, labels) in enumerate(shards):
        assert torch.equal(inputs[0], layout.positions(rank))
        assert torch.equal(labels, inputs + 1)
    assert torch.equal(layout.unshard([i for i, _ in shards], 1), windows[:, :-1])
    assert torch.equal(layout.unshard([t for _, t in shards], 1), windows[:, 1:])
