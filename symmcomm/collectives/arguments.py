"""Checks of arguments, made on the calling rank before anything is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmcomm.checks import Ranked, check_rank
from symmcomm.collectives.call import Kind, encode
from symmcomm.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from symmcomm.collectives.gpu import GpuCollectives
    from symmcomm.communicator import Communicator

_CPU = torch.device("cpu")


def gpu_of(comm: Communicator, tensor: object, name: str) -> GpuCollectives | None:
    """The GPU side of the communicator if the tensor is on a GPU; on which, its calls check. Raises ArgumentError if
    there is none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    return comm.gpu if comm.gpu is not None else comm.gpu_on(tensor.device, name)


def check_dense(tensor: object, name: str, device: torch.device = _CPU) -> None:
    """Raises ArgumentError unless ``tensor`` is a dense tensor on the device, and has memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name} must be dense (torch.strided), its layout is {tensor.layout}")
    if tensor.device != device:
        raise ArgumentError(f"{name} must be on device {device}, it is on {tensor.device}")
    if tensor.numel() and not tensor.data_ptr():
        raise ArgumentError(
            f"{name} of shape {tuple(tensor.shape)} has no memory: it is a fake tensor, or its storage was resized to 0"
        )


def check_tensor(tensor: object, name: str, device: torch.device = _CPU) -> None:
    """Raises ArgumentError unless ``tensor`` is dense, contiguous and on the device, and its memory holds its
    values."""
    check_dense(tensor, name, device)
    assert isinstance(tensor, torch.Tensor)
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{name} must be contiguous: shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            f"pass {name}.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{name} is a lazy conjugate or negative view; pass {name}.resolve_conj().resolve_neg()")


def check_pair(
    output: torch.Tensor,
    input: torch.Tensor,
    outputs_per_input: int,
    inputs_per_output: int,
    device: torch.device = _CPU,
) -> None:
    """Raises unless both tensors are fit, of one dtype, and their element counts stand in the given proportion."""
    check_tensor(output, "output", device)
    check_tensor(input, "input", device)
    if output.dtype is not input.dtype:
        raise DTypeError(f"output and input must have one dtype, got {output.dtype} and {input.dtype}")
    if output.numel() * inputs_per_output != input.numel() * outputs_per_input:
        raise ArgumentError(
            f"output has {output.numel()} elements (shape {tuple(output.shape)}), input {input.numel()} "
            f"(shape {tuple(input.shape)}): expected {outputs_per_input} of output to {inputs_per_output} of input"
        )


def prepare_pair(
    comm: Communicator,
    kind: Kind,
    output: torch.Tensor,
    input: torch.Tensor,
    outputs_per_input: int,
    inputs_per_output: int,
) -> int | None:
    """Checks the two tensors of a call (see ``check_pair``); returns its word (``collectives.call``), or None if the
    call is for the GPU.

    The look-up is for speed: most calls are right, and like one before.
    """
    if comm.gpu is not None and gpu_of(comm, output, "output") is not None:
        return None
    try:
        dtype = input.dtype
        prepared = comm.calls[kind, dtype]
        fit = (
            output.dtype is dtype
            and output.nbytes * inputs_per_output == input.nbytes * outputs_per_input
            and output.is_contiguous()
            and input.is_contiguous()
            and output.is_cpu
            and input.is_cpu
            and output.data_ptr()
            and input.data_ptr()
            and not output.is_neg()
            and not input.is_neg()
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):
        fit = False
    if not fit:
        gpu_of(comm, output, "output")
        check_pair(output, input, outputs_per_input, inputs_per_output)
        prepared = encode(kind, input.dtype)
        if not input.dtype.is_complex:  # these may be lazily conjugated, which only check_tensor sees
            comm.calls[kind, input.dtype] = prepared
    return prepared


def check_place(comm: Ranked, whole: int, part: int, part_bytes: int, whole_name: str, part_name: str) -> None:
    """Raises ArgumentError if a part, at an address, overlaps the whole elsewhere than at the rank's own place in it:
    there it would be written over before a peer has read it, or after it was written."""
    at = part - whole
    if -part_bytes < at < part_bytes * comm.world_size and at != comm.rank * part_bytes:
        raise ArgumentError(
            f"{part_name} begins {at} bytes into {whole_name}: there it may only be part {comm.rank} of it, at "
            f"{comm.rank * part_bytes}"
        )


def prepare_rooted(
    comm: Communicator, kind: Kind, tensor: torch.Tensor, root: int, name: str
) -> int | None:
    """As ``prepare_pair``, for the one tensor of a call with a root."""
    if comm.gpu is not None and gpu_of(comm, tensor, "tensor") is not None:
        return None
    try:
        prepared = comm.calls[kind, tensor.dtype, root]
        fit = (
            type(root) is int and tensor.is_contiguous() and tensor.is_cpu and tensor.data_ptr() and not tensor.is_neg()
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):
        fit = False
    if not fit:
        gpu_of(comm, tensor, "tensor")
        check_tensor(tensor, "tensor")
        check_rank(comm, root, name)
        prepared = encode(kind, tensor.dtype, root=root)
        if not tensor.dtype.is_complex:
            comm.calls[kind, tensor.dtype, root] = prepared
    return prepared


def parse_device(device: object) -> torch.device | None:
    """The device that ``device`` names; None for the host. Raises ArgumentError if it names none."""
    try:
        parsed = _CPU if device is None else torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={device!r} is not a device: {str(error).splitlines()[0]}") from None
    return None if parsed.type == "cpu" else parsed


def check_whole(value: object, name: str) -> None:
    """Raises ArgumentError unless the value is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name}={value!r} is not a whole number")


def check_list(
    comm: Ranked,
    tensors: Sequence[torch.Tensor] | None,
    tensor: torch.Tensor,
    name: str,
    root: int,
    device: torch.device = _CPU,
) -> list[torch.Tensor]:
    """The root's list of one tensor a rank, each like ``tensor``; elsewhere it must be absent or empty."""
    if comm.rank != root:
        if tensors:
            raise ArgumentError(f"{name} must be None on rank {comm.rank}, which is not the root {root}")
        return []
    if tensors is None or len(tensors) != comm.world_size:
        given = "None" if tensors is None else f"{len(tensors)} tensors"
        raise ArgumentError(f"{name} must have {comm.world_size} tensors on the root {root}, got {given}")
    for idx, part in enumerate(tensors):
        check_tensor(part, f"{name}[{idx}]", device)
        if part.dtype is not tensor.dtype:
            raise DTypeError(f"{name}[{idx}] and tensor must have one dtype, got {part.dtype} and {tensor.dtype}")
        if part.numel() != tensor.numel():
            raise ArgumentError(f"{name}[{idx}] has {part.numel()} elements, tensor has {tensor.numel()}")
    return list(tensors)
