"""A graph pass for tensor-parallel blocks: all-reduce, addition of the residual and RMSNorm become one operator.

    def backend(graph_module, example_inputs):
        fuse_norm(graph_module)
        return graph_module.forward

    block = torch.compile(block, backend=backend)

What is found: an all-reduce (``torch.ops.symmcomm.all_reduce``, or a functional collective and its wait) of op sum, of
which a view may be taken; its sum with anything of the same shape; and an RMSNorm of that, be it ``rms_norm`` or
spelled out as mean, rsqrt and products, with casts to float32 and back. The graph may be Dynamo's (torch functions,
methods) or AOTAutograd's (aten). The group must be one of the backend ``symm``. The sum may have other uses, as the new
residual has; the all-reduce must have none. It becomes
``torch.ops.symmcomm.all_reduce_rms_norm``, which rounds less often than the separate calls and has no gradient: for
inference, or for the forward graph that AOTAutograd has split off.
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from symmcomm.distributed import norm_ops  # noqa: F401  # registers the operator
from symmcomm.distributed.process_group import SymmProcessGroup
from symmcomm.distributed.torch_ops import _group
from symmcomm.fused.rows import DTYPES
from symmcomm.schedule.select_norm import MAX_HIDDEN

_ALL_REDUCES = ("symmcomm.all_reduce", "_c10d_functional.all_reduce")
_CASTS = ("_to_copy", "to", "float", "type_as", "convert_element_type")
_VIEWS = ("view", "_unsafe_view", "reshape")


class _Norm(NamedTuple):
    """``value`` normed, times ``weight`` + ``weight_bias``."""

    value: Node
    weight: Node
    eps: float
    weight_bias: float = 0.0


class _Reduced(NamedTuple):
    """All-reduce of ``source``, and the nodes from there to its last view."""

    source: Node
    group_name: str
    chain: list[Node]


def _name(node: Any) -> str:
    """What a node does, whether written as an operator, a method or a function; "" for what is no call."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._opname
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is(node: Any, *names: str) -> bool:
    return _name(node) in names


def _uncast(node: Any) -> Any:
    """What a node was before casts."""
    while _is(node, *_CASTS):
        node = node.args[0]
    return node


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _value(node: Any) -> torch.Tensor | None:
    """A tensor of the node's shape and dtype, if the graph was traced with one."""
    if not isinstance(node, Node):
        return None
    found = node.meta.get("val", node.meta.get("example_value"))
    return found if isinstance(found, torch.Tensor) else None


def _constant(pair: tuple[Any, ...]) -> tuple[Any, float] | None:
    """(node, number) of two operands in any order."""
    for one, other in (pair, pair[::-1]):
        if isinstance(one, Node) and isinstance(other, int | float) and not isinstance(other, bool):
            return one, float(other)
    return None


def _over_rows(mean: Node) -> bool:
    """Whether a mean is over the last dimension alone, which it keeps."""
    dims, keeps = _argument(mean, 1, "dim"), _argument(mean, 2, "keepdim", False)
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    value = _value(mean.args[0])
    return bool(keeps) and (dims == [-1] or (value is not None and dims == [value.dim() - 1]))


def _square_of(node: Any) -> Any:
    """x of x²."""
    if _is(node, "pow") and node.args[1] == 2:
        return node.args[0]
    if _is(node, "mul") and node.args[0] is node.args[1]:
        return node.args[0]
    return node.args[0] if _is(node, "square") else None


def _inverse_root(node: Any) -> tuple[Node, float] | None:
    """(x, eps) of rsqrt(mean(x²) + eps)."""
    if not _is(node, "rsqrt", "rsqrt_") or not _is(node.args[0], "add", "add_"):
        return None
    found = _constant(node.args[0].args[:2])
    if found is None or not _is(found[0], "mean") or not _over_rows(found[0]):
        return None
    squared = _square_of(found[0].args[0])
    return (squared, found[1]) if isinstance(squared, Node) else None


def _unscaled(node: Any) -> tuple[Node, float] | None:
    """(x, eps) of x · rsqrt(mean(x²) + eps), with casts before and between."""
    node = _uncast(node)
    if not _is(node, "mul"):
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        found = _inverse_root(_uncast(other))
        if found is not None and _uncast(found[0]) is _uncast(one):
            return _uncast(one), found[1]
    return None


def _spelled_out(node: Node) -> _Norm | None:
    """A norm whose last product, or its cast, is the node."""
    product = _uncast(node)
    if not _is(product, "mul"):
        return None
    for one, other in (product.args[:2], product.args[1::-1]):
        found, weight, weight_bias = _unscaled(one), _uncast(other), 0.0
        if _is(weight, "add") and (shifted := _constant(weight.args[:2])):
            weight, weight_bias = _uncast(shifted[0]), shifted[1]
        if found is not None and isinstance(weight, Node):
            return _Norm(found[0], weight, found[1], weight_bias)
    return None


def _find_norm(node: Node) -> _Norm | None:
    """The norm that ends in a node: in its outermost cast, where there is one."""
    norm: Any = node.args[0] if _is(node, "getitem") and node.args[1] == 0 else node
    if _is(norm, "rms_norm" if norm is node else "_fused_rms_norm"):
        shape, weight, eps = (_argument(norm, i, n) for i, n in ((1, "normalized_shape"), (2, "weight"), (3, "eps")))
        if len(shape) != 1 or not isinstance(weight, Node):
            return None
        value: Any = norm.args[0]
        return _Norm(value, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    if any(_is(user, *_CASTS) for user in node.users):
        return None
    return _spelled_out(node)


def _find_reduced(node: Any) -> _Reduced | None:
    """An all-reduce behind views, used for nothing else."""
    chain: list[Node] = []
    while _is(node, *_VIEWS, "wait_tensor") and len(node.users) == 1:
        chain.append(node)
        node = node.args[0]
    if not _is(node, "all_reduce") or len(node.users) != 1 or not str(node.target).startswith(_ALL_REDUCES):
        return None
    source, op, group_name = node.args[:3]
    if op != "sum" or not isinstance(_group(group_name), SymmProcessGroup):
        return None
    return _Reduced(source, group_name, [*chain, node])


def _fits(root: Node, norm: _Norm, total: Node) -> bool:
    """Whether the operator can do it, as far as shapes and dtypes are known."""
    value, weight, result = _value(total), _value(norm.weight), _value(root)
    if value is None or weight is None:
        return True
    if result is not None and result.dtype is not value.dtype:
        return False
    hidden = value.shape[-1]
    same = weight.dtype is value.dtype and weight.shape == (hidden,)
    return same and value.dtype in DTYPES and 1 <= hidden <= MAX_HIDDEN


def _brought_before(node: Node, total: Node, position: dict[Node, int]) -> bool:
    """Whether the weight stands before the sum, or part of a tensor that does, and then is moved there."""
    if position.get(node, -1) < position[total]:  # new nodes stand before sums that were fused already
        return True
    movable = node.op == "get_attr" or _is(node, "getitem", "select", "unbind", *_CASTS, *_VIEWS)
    if not movable or not all(_brought_before(each, total, position) for each in node.all_input_nodes):
        return False
    total.prepend(node)
    return True


def _fuse(root: Node, norm: _Norm, position: dict[Node, int]) -> bool:
    """Replaces one norm if all-reduce and residual stand before it."""
    total = norm.value
    if (
        not _is(total, "add")
        or len(total.args) != 2
        or total.kwargs.get("alpha", 1) != 1
        or not _fits(root, norm, total)
    ):
        return False
    for one, residual in (total.args[:2], total.args[1::-1]):
        reduced = _find_reduced(one)
        if reduced is None or not isinstance(residual, Node):
            continue
        shapes = [value.shape for value in map(_value, (one, residual)) if value is not None]
        if len(set(shapes)) > 1 or not _brought_before(norm.weight, total, position):
            return False
        _replace(root, total, reduced, residual, norm)
        return True
    return False


def _replace(root: Node, total: Node, reduced: _Reduced, residual: Node, norm: _Norm) -> None:
    graph, source = total.graph, reduced.source
    with graph.inserting_before(total):
        for view in reversed(reduced.chain):
            if _is(view, *_VIEWS):
                source = graph.create_node(view.op, view.target, (source, *view.args[1:]), view.kwargs)
                source.meta = dict(view.meta)
        arguments = (source, residual, norm.weight, norm.eps, reduced.group_name, None, norm.weight_bias)
        fused = graph.call_function(torch.ops.symmcomm.all_reduce_rms_norm.default, arguments)
        out, new_residual = (graph.call_function(getitem, (fused, index)) for index in (0, 1))
    for old, new in ((root, out), (total, new_residual)):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
    if (result := _value(root)) is not None:
        fused.meta["val"] = (result, _value(total))
    for dead in (total, *reduced.chain):
        graph.erase_node(dead)


def fuse_norm(graph_module: GraphModule) -> int:
    """Replaces every all-reduce, addition and RMSNorm in the graph by the fused operator; see the module.

    Args:
        graph_module: of ``torch.compile`` or ``make_fx``; changed in place and recompiled.

    Returns:
        How many there were.
    """
    graph, count = graph_module.graph, 0
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        norm = _find_norm(node) if node in position and node.users else None
        if norm is not None and _fuse(node, norm, position):
            count += 1
    if count:
        graph.eliminate_dead_code()
        graph.lint()
        graph_module.recompile()
    return count
