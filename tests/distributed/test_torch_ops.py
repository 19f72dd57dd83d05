"""torch.ops.symmcomm: right values and gradients, in eager mode, compiled, and exported."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from symmcomm.testing.spawn import run_ranks

ops = torch.ops.symmcomm


def source(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * 3.0).view(rows, 3) + 10 * rank


def values() -> None:
    dist.init_process_group("symm")
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    rows = 2 * size
    sources = [source(peer, rows) for peer in range(size)]
    mine, total, part = sources[rank], sum(sources), slice(2 * rank, 2 * rank + 2)
    before = mine.clone()
    expected = {
        "all_reduce": (ops.all_reduce(mine, "sum", name), total),
        "all_reduce of a view": (ops.all_reduce(mine.t(), "max", name), sources[-1].t()),
        "average": (ops.all_reduce(mine, "avg", name), total / size),
        "reduce": (ops.reduce(mine, 1, "sum", name), total if rank == 1 else torch.zeros_like(mine)),
        "reduce_scatter": (ops.reduce_scatter_tensor(mine, "sum", name), total[part]),
        "all_gather": (ops.all_gather_into_tensor(mine, name), torch.cat(sources)),
        "all_to_all": (ops.all_to_all_single(mine, [], [], name), torch.cat([other[part] for other in sources])),
        "broadcast": (ops.broadcast(mine, 1, name), sources[1]),
        "gather": (ops.gather(mine, 1, name), torch.cat(sources) if rank == 1 else mine[:0]),
        "scatter": (ops.scatter(mine, 1, name), sources[1][part]),
        "barrier": (ops.barrier(mine, name), mine),
    }
    for call, (got, right) in expected.items():
        assert torch.equal(got, right), call
        assert got.is_contiguous(), call
    assert torch.equal(mine, before)
    ops.all_reduce_(mine, "sum", name)
    assert torch.equal(mine, total)
    sent = [1 + (rank + peer) % 2 for peer in range(size)]
    got = ops.all_to_all_single(torch.full((sum(sent), 2), float(rank)), sent, sent, name)
    assert got[:, 0].tolist() == [peer for peer in range(size) for _ in range(sent[peer])]
    for call, error in (
        (lambda: ops.all_reduce(mine, "mean", name), ValueError),
        (lambda: ops.reduce_scatter_tensor(torch.ones(size + 1), "sum", name), ValueError),
    ):
        with pytest.raises(error):
            call()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size: int) -> None:
    run_ranks(values, world_size)


def weights(shape: torch.Size, salt: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def differentiated(name: str, rank: int, size: int) -> dict[str, object]:
    """Functions of one tensor of 2 · size rows."""
    counts = [1 if peer % 2 else 3 for peer in range(size)] if size % 2 == 0 else [2] * size
    sent = [[counts[(src + dst) % size] for dst in range(size)] for src in range(size)]
    return {
        "all_reduce": lambda x: ops.all_reduce(x, "sum", name),
        "average": lambda x: ops.all_reduce(x, "avg", name),
        "reduce": lambda x: ops.reduce(x, 1, "sum", name),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "avg", name),
        "all_gather": lambda x: ops.all_gather_into_tensor(x, name),
        "all_to_all": lambda x: ops.all_to_all_single(x, [], [], name),
        "uneven all_to_all": lambda x: ops.all_to_all_single(
            x, [sent[src][rank] for src in range(size)], sent[rank], name
        ),
        "broadcast": lambda x: ops.broadcast(x, 1, name),
        "gather": lambda x: ops.gather(x, 1, name),
        "scatter": lambda x: ops.scatter(x, 1, name),
        "barrier": lambda x: ops.barrier(x, name),
        "view": lambda x: ops.all_reduce(x.t(), "sum", name).t(),
    }


def gradients() -> None:
    """The operators are linear: the sum of <y, w> over the ranks must be the sum of <x, gradient of x>, for any x."""
    dist.init_process_group("symm")
    rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    for call, function in differentiated(name, rank, size).items():
        x = weights(torch.Size((2 * size, 3)), rank).requires_grad_()
        y = function(x)  # type: ignore[operator]
        w = weights(y.shape, 100 + rank)
        (y * w).sum().backward()
        sums = torch.stack([(y * w).sum().detach(), (x * x.grad).sum().detach()])
        dist.all_reduce(sums)
        torch.testing.assert_close(sums[0], sums[1], msg=f"{call}: {sums.tolist()}")
    for nonlinear in ("max", "prod"):
        x = torch.ones(2 * size, requires_grad=True)
        with pytest.raises(TypeError, match=f"op={nonlinear} has no gradient"):
            ops.all_reduce(x, nonlinear, name).sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients(world_size: int) -> None:
    run_ranks(gradients, world_size)


class Layer(torch.nn.Module):
    """A layer with one of each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ops.all_gather_into_tensor(self.linear(x), self.name)
        x = ops.all_to_all_single(x.relu(), [], [], self.name)
        x = ops.reduce_scatter_tensor(x, "sum", self.name)
        x = ops.broadcast(ops.all_reduce(x, "avg", self.name), 0, self.name)
        return ops.all_reduce(x * 2, "sum", self.name)


def layer(name: str) -> Layer:
    torch.manual_seed(0)
    return Layer(name)


def compiled(backend: str, dynamic: bool) -> None:
    dist.init_process_group("symm")
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    results = []
    for wrap in (
        lambda module: module,
        lambda module: torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic),
    ):
        module = layer(name)
        wrapped = wrap(module)
        for rows in (4, 6) if dynamic else (4,):
            x = source(rank, rows).requires_grad_()
            y = wrapped(x)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, module.linear.weight.grad.clone()))
    half = len(results) // 2
    for eager, other in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(eager, other)
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("aot_eager", True)])
def test_compiled(backend: str, dynamic: bool) -> None:
    run_ranks(compiled, 2, backend, dynamic, timeout_s=120)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    run_ranks(compiled, 2, "inductor", False, timeout_s=280)


def exported() -> None:
    dist.init_process_group("symm")
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    module = layer(name).eval()
    program = torch.export.export(module, (source(rank),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("symmcomm.") for target in targets) == 6
    torch.testing.assert_close(program.module()(source(rank)), module(source(rank)))
    dist.destroy_process_group()


def test_exported() -> None:
    run_ranks(exported, 2, timeout_s=120)


def checked() -> None:
    dist.init_process_group("symm")
    name = dist.group.WORLD.group_name
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for operator, arguments in (
        (ops.all_reduce.default, (x, "sum", name)),
        (ops.all_reduce_.default, (x.detach().clone(), "sum", name)),
        (ops.reduce.default, (x, 0, "sum", name)),
        (ops.reduce_scatter_tensor.default, (x, "sum", name)),
        (ops.all_gather_into_tensor.default, (x, name)),
        (ops.all_to_all_single.default, (x, [], [], name)),
        (ops.broadcast.default, (x, 0, name)),
        (ops.scatter.default, (x, 0, name)),
        (ops.barrier.default, (x, name)),
    ):
        torch.library.opcheck(operator, arguments)
    dist.destroy_process_group()


def test_opcheck() -> None:
    run_ranks(checked, 2, timeout_s=200)


def compiled_dist() -> None:
    """torch's own collectives in compiled code, which go through functional collectives."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()

    def function(x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(size * x.shape[0], 3)
        dist.all_gather_into_tensor(output, x)
        part = torch.zeros(x.shape[0], 3)
        dist.reduce_scatter_tensor(part, output * 2)
        dist.all_reduce(part)
        return part + 1

    x = source(rank)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
    dist.destroy_process_group()


def test_compiled_torch_distributed() -> None:
    run_ranks(compiled_dist, 2, timeout_s=120)


def compiled_with_breaks() -> None:
    """What has no functional form is called between compiled graphs, as on the groups that torch comes with."""
    dist.init_process_group("symm")
    rank, size = dist.get_rank(), dist.get_world_size()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + rank
        dist.broadcast(y, 1)
        dist.barrier()
        z = y * (rank + 1)
        dist.reduce(z, 0)
        got = torch.zeros_like(x)
        if rank == 0:
            dist.send(z + 1, 1)
        else:
            dist.recv(got, 0)
        work = dist.all_gather_into_tensor(torch.zeros(size * 3), got, async_op=True)
        work.wait()
        parts = [torch.zeros(3) for _ in range(size)]
        dist.gather(got, parts if rank == 0 else None)
        return parts[1] * 2

    x = torch.arange(3.0)
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), function(x))
    dist.destroy_process_group()


def test_compiled_with_graph_breaks() -> None:
    run_ranks(compiled_with_breaks, 2, timeout_s=120)
