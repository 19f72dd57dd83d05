"""Send and receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symmcomm.collectives.arguments import prepare_rooted
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from symmcomm.communicator import Communicator


def _prepare(self: Communicator, tensor: torch.Tensor, peer: int, name: str) -> tuple[int, int] | None:
    """The call word and the bytes of a message; None if it is for the GPU."""
    if peer == self.rank:
        raise ArgumentError(f"{name}={peer} is the calling rank itself")
    on_cpu = prepare_rooted(self, Kind.send, tensor, peer, name) is not None
    return (encode(Kind.send, tensor.dtype), tensor.nbytes) if on_cpu else None


def send(self: Communicator, tensor: torch.Tensor, dst: int) -> None:
    """Sends ``tensor`` to rank ``dst``. Messages of a pair arrive in the order sent; small ones return before they are
    received. Where the receiver expected another dtype or element count, both ranks get MismatchError, the sender in
    this or its next ``send`` to that rank."""
    prepared = _prepare(self, tensor, dst, "dst")
    if prepared is None:
        return self.gpu_side.send(tensor, dst)
    call, num_bytes = prepared
    status = self.kernels.send(self.ctx, call, tensor.data_ptr(), num_bytes, dst)
    if status:
        self.fail(status)


def recv(self: Communicator, tensor: torch.Tensor, src: int) -> None:
    """Receives rank ``src``'s next message into ``tensor``, of the dtype and element count that was sent."""
    prepared = _prepare(self, tensor, src, "src")
    if prepared is None:
        return self.gpu_side.recv(tensor, src)
    call, num_bytes = prepared
    status = self.kernels.receive(self.ctx, call, tensor.data_ptr(), num_bytes, src)
    if status:
        self.fail(status)
