"""What a compiled backward does beyond AOTAutograd's: it may run again, and says where it can't be
differentiated.

Run again, over one forward: `retain_graph=True`, or `torch.autograd.grad` once for each loss. A
backward that Inductor compiles may write to tensors that its forward saved for it ("donated
buffers"): less memory is taken. If the first backward of all keeps its graph, it is compiled
without that; otherwise AOTAutograd raises where a later one keeps it. Here such a backward gets
copies of these tensors instead. Who keeps no graph pays nothing.

Be differentiated: AOTAutograd raises by itself only if an input of the backward needs a gradient;
otherwise the backward's results are constants. A stored weight needs one; its cast to a low dtype,
which is stored in its place, does not (read in torch 2.12, where a gradient penalty then
trains nothing, silently). So under `create_graph=True` we make the results no constants.

AOTAutograd makes an autograd.Function for each graph that it compiles. The backward of this class
is wrapped, once: a hook on the node of each call costs a small network a few percent of its step,
since torch hands it all gradients. Other nodes get the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import MPCompileError
from ..torch_inside.inductor import CopiedContext, is_compiled
from ..torch_inside.names import keeps_graph
from ..torch_inside.tensors import for_each_sample, function_of
from .fakes import duplicate
from .units import GradFn, between, grad_fns

Gradients = tuple[Tensor | None, ...]
_WRAPPED = "mpcompile_wrapped"  # on a class of AOTAutograd's: its backward is


def _wrap_backward(function: Any) -> None:
    """Give each backward of a class of AOTAutograd's that keeps its graph, and may write to what is
    saved in it, copies of that. Let the gradients raise that it returns.
    """
    backward, donated = function.backward, None

    def again(ctx: Any, *gradients: Any, kept: bool = False) -> Any:
        nonlocal donated
        if kept or (keeps_graph() and function.compiled_bw is not None):
            metadata = function.metadata
            found = [i - metadata.num_symints_saved_for_bw for i in metadata.bw_donated_idxs or ()]
            if donated is None:
                donated = found
            # AOTAutograd raises if it finds any. (Removed last: another thread may look, too.)
            if keeps_graph():
                metadata.bw_donated_idxs = []
            if donated or kept:
                ctx = CopiedContext(ctx, donated, duplicate)
        results = backward(ctx, *gradients)
        return _connected(results) or results

    def call(ctx: Any, *gradients: Any) -> Any:
        # Read in torch 2.13: they come in one list.
        in_list = len(gradients) == 1 and isinstance(gradients[0], list)

        def sample(*own: Any) -> Any:
            return again(ctx, *([[*own]] if in_list else own), kept=True)

        # No compiled code takes a batch of gradients, as of `is_grads_batched=True`.
        batched = for_each_sample(sample, gradients[0] if in_list else gradients)
        return again(ctx, *gradients) if batched is None else batched

    # Disabled for Dynamo, which looks at each frame of a `backward()` within a compiled function.
    function.backward = staticmethod(torch.compiler.disable(call))
    setattr(function, _WRAPPED, True)


def noticed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph, compiled or not: its gradients raise if they are differentiated; of what
    AOTAutograd compiled in it, the backward may run several times over one forward.
    """
    # All is known after the first call (in which something has a history), and the same in each:
    # Dynamo compiles another graph where other inputs need gradients.
    returns_inputs: bool | None = None
    raise_by_themselves = False

    def graph(*args: Any) -> Any:
        nonlocal returns_inputs, raise_by_themselves
        if raise_by_themselves:
            return run(*args)
        # An input that is returned has its own history. It is asked of no input otherwise: with
        # cold caches, that takes longer than all else here.
        before = grad_fns(args) if returns_inputs is not False else set()
        results = run(*args)
        if returns_inputs is None:
            # An input that the graph wrote to has a new history, too; and what AOTAutograd returns
            # may be a view of what its class returned.
            for node in between(grad_fns((*results, *args)), before):
                function = function_of(node)
                if is_compiled(function) and _WRAPPED not in vars(function):
                    _wrap_backward(function)
            returns_inputs = _share(args, results, before)
        nodes = grad_fns(results)
        raise_by_themselves = _notice(nodes - before) and before.isdisjoint(nodes)
        return results

    return graph


def _share(args: Sequence[Any], results: Sequence[Any], before: set[GradFn]) -> bool:
    """Whether a result is an input, or has the history of one."""
    given = {id(a) for a in args if isinstance(a, Tensor)}
    return any(id(r) in given for r in results) or not before.isdisjoint(grad_fns(results))


def notice(results: Sequence[Any]) -> None:
    """The same for the results of an autograd.Function: `once_differentiable` raises only if the
    gradients that come in need one themselves.
    """
    _notice(grad_fns(results))


def _notice(nodes: set[GradFn]) -> bool:
    """Let the gradients of these raise. Returns whether they do so without a hook."""
    others = [node for node in nodes if not is_compiled(function_of(node))]
    for node in others:
        node.register_hook(lambda gradients, _: _connected(gradients))
    return bool(nodes) and not others


def _connected(gradients: Gradients) -> Gradients | None:
    """The same gradients, which raise when they are differentiated; None: nobody can."""
    if not torch.is_grad_enabled():
        return None
    anchor = torch.empty(0, requires_grad=True)
    return tuple(
        g if g is None else _Once.apply(g, anchor)  # type: ignore[no-untyped-call]
        for g in gradients
    )


class _Once(torch.autograd.Function):
    """Identity on a gradient; the result needs a gradient, and its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise MPCompileError(
            "the gradients of a compiled graph can't be differentiated (double backward, as for a "
            "gradient penalty): call torch.autograd.grad(create_graph=True) or torch.func.grad "
            "inside of what is compiled, the model's forward or mpcompile(step); or don't compile"
        )
