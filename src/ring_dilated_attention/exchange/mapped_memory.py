"""Memory of GPUs of one host that all ranks of a group have mapped.

torch's symmetric memory is the same, but up to torch 2.13 its ranks hang when some of a group have
mapped memory in another group before, and some have not (pytorch/pytorch#196082).
"""

from __future__ import annotations

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
from .cuda_driver import checked, driver

HANDSHAKE_S = 60.0
"""So long a rank waits for another's file, having heard that all are about to pass theirs."""


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


def _allocate(nbytes: int, index: int) -> tuple[int, Any]:
    """Memory on a device: its bytes, rounded up, and its handle."""
    cuda = driver()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _as_file()
    _place(properties.location, index)
    smallest = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = _checked(cuda.cuMemGetAllocationGranularity(properties, smallest))
    size = -(-nbytes // unit) * unit
    return size, _checked(cuda.cuMemCreate(size, properties, 0))


def _as_file() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _place(location: Any, index: int) -> None:
    """Set a location of the driver to a device."""
    location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = index


def _release(handle: Any) -> None:
    """Let go of memory; what is mapped stays."""
    _checked(driver().cuMemRelease(handle))


def _export(handle: Any) -> int:
    return int(_checked(driver().cuMemExportToShareableHandle(handle, _as_file(), 0)))


def _import(file: int) -> Any:
    return _checked(driver().cuMemImportFromShareableHandle(file, _as_file()))


def _map(handle: Any, size: int, index: int, mapped: ExitStack) -> int:
    """Where a device finds memory from now on, until `mapped` is closed."""
    cuda = driver()
    address = _checked(cuda.cuMemAddressReserve(size, 0, 0, 0))
    mapped.callback(lambda: _checked(cuda.cuMemAddressFree(address, size)))
    _checked(cuda.cuMemMap(address, size, 0, handle, 0))
    mapped.callback(lambda: _checked(cuda.cuMemUnmap(address, size)))
    access = cuda.CUmemAccessDesc()
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _place(access.location, index)
    _checked(cuda.cuMemSetAccess(address, size, [access], 1))
    return int(address)


def _checked(outcome: tuple[Any, ...]) -> Any:
    return checked(outcome, "sharing memory between GPUs")


def _unmap(mapped: ExitStack, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # streams may still read and write there
    mapped.close()
