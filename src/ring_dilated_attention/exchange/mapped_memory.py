"""Memory of GPUs of one host that all ranks of a group have mapped.

torch's symmetric memory is the same, but up to torch 2.13 its ranks hang when some of a group have
mapped memory in another group before, and some have not (pytorch/pytorch#196082).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .board import PREFIX
from .cuda_driver import check, driver

HANDSHAKE_S = 60.0
"""So long a rank waits for another's file, having heard that all are about to pass theirs."""

_PINNED, _ON_DEVICE, _AS_FILE, _READ_WRITE = 1, 1, 1, 3  # of the driver's enumerations


class MappedMemory:
    """Memory of each rank of a group, which all of them can read and write.

    It is not in the figures of torch's allocator, and is there until no rank has it mapped.

    Attributes:
        addresses: where this rank finds the memory of each rank, which is not initialised.

    Args:
        nbytes: of each rank.
        device: this rank's, which can read the memory of the others'.
        rank: this rank.
        share: every rank's value, by rank: a collective, in which all ranks are at once.

    Raises:
        RuntimeError: memory cannot be shared, on this rank or another.
    """

    def __init__(
        self, nbytes: int, device: torch.device, rank: int, share: Callable[[Any], list[Any]]
    ) -> None:
        torch.cuda.synchronize(device)  # the driver needs a context
        index = torch.cuda.current_device() if device.index is None else device.index
        mapped = ExitStack()
        weakref.finalize(self, _unmap, mapped, device).atexit = False  # the process leaves anyway
        with ExitStack() as meanwhile:
            size, own, file, failure = 0, 0, None, ""
            try:
                size, own = _allocate(nbytes, index)
                meanwhile.callback(_release, own)
                file = _export(own)
                meanwhile.callback(os.close, file)
            except (OSError, RuntimeError) as error:  # there is no driver, or it refuses
                failure = str(error)
            files = meanwhile.enter_context(passed_files(file, failure, rank, share))
            self.addresses: list[int] = []
            for other, received in enumerate(files):
                handle = own
                if other != rank:
                    handle = _import(received)
                    meanwhile.callback(_release, handle)
                self.addresses.append(_map(handle, size, index, mapped))


@contextmanager
def passed_files(
    own: int | None, failure: str, rank: int, share: Callable[[Any], list[Any]]
) -> Iterator[list[int]]:
    """Inside, this process has a file of every rank; a file is a descriptor, and no name.

    Args:
        own: this rank's; None: it has none.
        failure: why it has none.
        rank: this rank.
        share: see `MappedMemory`.

    Raises:
        RuntimeError: a rank has none, or they could not be passed.
    """
    with ExitStack() as stack:
        address = None
        if own is not None:
            try:
                server, address = _listening(stack)
            except OSError as error:
                failure = str(error)
        addresses = share((address, failure))
        failures = [f"rank {other}: {why}" for other, (where, why) in enumerate(addresses)
                    if where is None]  # fmt: skip
        if failures:
            raise RuntimeError("; ".join(failures))
        assert own is not None
        try:
            peers = {
                other: _connected(where, stack)
                for other, (where, _) in enumerate(addresses)
                if other != rank
            }
            for _ in peers:
                with _accepted(server) as peer:
                    socket.send_fds(peer, [b"file"], [own])
            files = {rank: own}
            for other, peer in peers.items():
                files[other] = _received(peer, stack)
        except OSError as error:
            raise RuntimeError(f"ranks could not pass each other files: {error}") from error
        yield [files[other] for other in range(len(addresses))]


def _listening(stack: ExitStack) -> tuple[socket.socket, str]:
    """A socket, and its address, which is no file: nothing stays behind."""
    address = f"\0{PREFIX}{secrets.token_hex(16)}"
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.settimeout(HANDSHAKE_S)
    server.bind(address)
    server.listen(socket.SOMAXCONN)
    return server, address


def _accepted(server: socket.socket) -> socket.socket:
    """A connection from a process of this user; those of others are refused."""
    while True:
        peer, _ = server.accept()
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
            return peer
        peer.close()


_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def _connected(address: str, stack: ExitStack) -> socket.socket:
    peer = stack.enter_context(socket.socket(socket.AF_UNIX))
    peer.settimeout(HANDSHAKE_S)
    peer.connect(address)
    return peer


def _received(peer: socket.socket, stack: ExitStack) -> int:
    _, files, *_ = socket.recv_fds(peer, 4, 1)
    if not files:
        raise OSError("a rank has gone")
    stack.callback(os.close, files[0])
    return files[0]


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _check(result: int) -> None:
    check(result, "sharing memory between GPUs")


def _allocate(nbytes: int, index: int) -> tuple[int, int]:
    """Memory on a device: its bytes, rounded up, and its handle."""
    properties = _Properties(_PINNED, _AS_FILE, _Location(_ON_DEVICE, index))
    unit, handle = ctypes.c_size_t(), ctypes.c_uint64()
    _check(driver().cuMemGetAllocationGranularity(ctypes.byref(unit), ctypes.byref(properties), 0))
    size = -(-nbytes // unit.value) * unit.value
    _check(driver().cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), 0))
    return size, handle.value


def _release(handle: int) -> None:
    """Let go of memory; what is mapped stays."""
    _check(driver().cuMemRelease(handle))


def _export(handle: int) -> int:
    file = ctypes.c_int()
    _check(driver().cuMemExportToShareableHandle(ctypes.byref(file), handle, _AS_FILE, 0))
    return file.value


def _import(file: int) -> int:
    handle = ctypes.c_uint64()
    _check(driver().cuMemImportFromShareableHandle(ctypes.byref(handle), file, _AS_FILE))
    return handle.value


def _map(handle: int, size: int, index: int, mapped: ExitStack) -> int:
    """Where a device finds memory from now on, until `mapped` is closed."""
    library, address = driver(), ctypes.c_uint64()
    _check(library.cuMemAddressReserve(ctypes.byref(address), size, 0, 0, 0))
    mapped.callback(lambda: _check(library.cuMemAddressFree(address, size)))
    _check(library.cuMemMap(address, size, 0, handle, 0))
    mapped.callback(lambda: _check(library.cuMemUnmap(address, size)))
    access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
    _check(library.cuMemSetAccess(address, size, ctypes.byref(access), 1))
    return address.value


def _unmap(mapped: ExitStack, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # streams may still read and write there
    mapped.close()
