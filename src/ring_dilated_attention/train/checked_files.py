"""The files of a checkpoint: written to the disk, and read whole under SHA-256 checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from .errors import os_error_text

META = "meta.json"
SUMS = "SHA256SUMS"
TOKENIZER = "tokenizer.json"
TEXT_BYTES = 16 << 20  # of META and SUMS: those of a terabyte of tensors are smaller
PIECE_BYTES = 1 << 20  # read at a time for a checksum: in a processor's cache
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([a-z_]+(?:_\d{5,9})?\.(?:json|safetensors))")


class DamagedError(ValueError):
    """A file of a checkpoint is not what was written."""


def read_sums(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Checksums by file name. A changed byte changes a checksum or a name, or is refused.

    Args:
        path: the folder.
        names: patterns (`re`) of the names that may be listed; the first one must be.
    """
    text = read_file(path, SUMS, TEXT_BYTES).decode("latin-1")
    sums: dict[str, str] = {}
    for line in text.removesuffix("\n").split("\n"):
        match = _SUM_LINE.fullmatch(line)
        known = match is not None and any(re.fullmatch(name, match[2]) for name in names)
        if not match or not known or match[2] in sums:
            raise DamagedError(f"{SUMS} is damaged")
        sums[match[2]] = match[1]
    if not any(re.fullmatch(names[0], name) for name in sums) or not text.endswith("\n"):
        raise DamagedError(f"{SUMS} is damaged")
    return sums


def checked(
    path: Path, name: str, sums: Mapping[str, str] | None, limit: int | None = None
) -> bytes:
    """The bytes of a file, which have the checksum that `sums` says; any bytes where it is None."""
    data = read_file(path, name, limit)
    if sums is not None:
        compare(name, hashlib.sha256(data).hexdigest(), sums)
    return data


def check_listed(name: str, sums: Mapping[str, str] | None) -> None:
    """Raise a `DamagedError` if there are checksums, but none of this file."""
    if sums is not None and name not in sums:
        raise DamagedError(f"{name} has no checksum in {SUMS}")


def compare(name: str, actual: str, sums: Mapping[str, str]) -> None:
    """Raise a `DamagedError` unless a file has the checksum that `sums` says."""
    if actual != sums[name]:
        raise DamagedError(f"{name} does not have the checksum in {SUMS}; one of them is damaged")


def digest_of(file: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal, read piece by piece."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def read_file(path: Path, name: str, limit: int | None = None) -> bytes:
    """The bytes of a regular file, of at most `limit` bytes."""
    file = regular_file(path, name)
    try:
        if limit is not None and file.stat().st_size > limit:
            raise DamagedError(f"{name} has more than {limit} bytes")
        return file.read_bytes()
    except OSError as error:
        raise DamagedError(error_text(error)) from error


def regular_file(path: Path, name: str, size: int | None = None) -> Path:
    """The path of a file, which is one: neither a link nor a pipe, and of this size."""
    try:
        status = (path / name).lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise DamagedError(f"{name} is missing") from error
        raise DamagedError(error_text(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{name} is not a regular file")
    if size is not None and status.st_size != size:
        raise DamagedError(f"{name} has {status.st_size} bytes; {size} were written")
    return path / name


def error_text(error: Exception) -> str:
    """What an error says, of the system's in its words."""
    return os_error_text(error) if isinstance(error, OSError) else str(error)


def remove(path: Path) -> None:
    """Remove a folder, or a link in its place; nothing if there is none."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def write_synced(path: Path, data: bytes) -> str:
    """Write a new file to the disk. Returns its SHA-256 checksum in hexadecimal."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno, f"{error.strerror} ({free / 1e6:,.1f} MB free)", path.name
        ) from error
    return hashlib.sha256(data).hexdigest()


def sync(folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums of a folder's files, by name, as ``sha256sum -c`` reads them."""
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    write_synced(folder / SUMS, "".join(lines).encode())


def seal(partial: Path, path: Path, sums: dict[str, str]) -> None:
    """Give a folder of synced files its checksums and its name; replaces what has the name.

    Args:
        partial: the folder, which becomes `path`.
        path: what it is to be called, in the same folder.
        sums: SHA-256 of its files by name.
    """
    write_sums(partial, sums)
    sync(partial)
    if path.exists() or path.is_symlink():
        path.rename(path.parent / f".partial_old_{path.name}")
    partial.rename(path)
    sync(path.parent)
    for old in path.parent.glob(".partial_*"):
        remove(old)


def cut(tensors: dict[str, Tensor], file_bytes: int) -> list[list[str]]:
    """Names of tensors, by file: the same for any number of ranks."""
    files: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not files or size > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= size
    return files
