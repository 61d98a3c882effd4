"""Mistakes in arguments that a newcomer makes, or who comes from autocast, GradScaler, Apex,
Lightning or torch.compile: what the message says. It names the thing, and the way out.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_net import Net
from torch import nn

import mpcompile as module
from mpcompile import MPCompileError, MPCompileWarning
from mpcompile.errors import warn

# Any: a type checker would find most of these mistakes.
mp: Any = module
mpcompile, train_step = mp.mpcompile, mp.train_step
MPOptimizer, LossScale, Policy = mp.MPOptimizer, mp.LossScale, mp.Policy
explain, plan_for, diagnose, calibrate = mp.explain, mp.plan_for, mp.diagnose, mp.calibrate
loss_scale_of, compiled_plans = mp.loss_scale_of, mp.compiled_plans
compile_by_torch: Any = torch.compile

X = torch.zeros(4, 8)
Mistake = Callable[[], Any]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(**options: Any) -> Any:
    return MPOptimizer(sgd(Net()), **options)


def with_policy(**arguments: Any) -> Any:
    return mpcompile(Net(), policy=Policy(**arguments))


def stepping(**changes: Any) -> Any:
    given: dict[str, Any] = {"model": (model := Net()), "optimizer": sgd(model)}
    return train_step(**{**given, "loss_fn": F.mse_loss, **changes})


FP32 = "for FP32 without any cast use level='O0'"
LOW = "the low dtype is dtype='float16', 'bfloat16' or 'auto'"

# a value of an option of mpcompile() -> what the error says
VALUES: dict[tuple[str, Any], str] = {
    ("dtype", "fp61"): "did you mean 'fp16'?",
    ("dtype", "f16"): "did you mean 'fp16'?",
    ("dtype", "bfloat"): "did you mean 'bfloat16'?",
    ("dtype", "float"): FP32,
    ("dtype", torch.float32): FP32,
    ("dtype", "float64"): "it is wider than FP32; a model in FP64 runs as it is",
    ("dtype", torch.float64): "it is wider than FP32; a model in FP64 runs as it is",
    ("dtype", "tf32"): "torch.set_float32_matmul_precision('high') is TF32",
    ("dtype", torch.float8_e4m3fn): "there are two: 'float16' and 'bfloat16'",
    ("dtype", "int8"): "there are two: 'float16' and 'bfloat16'",
    ("dtype", "16-true"): "parameters stay in FP32, whatever the low dtype",
    ("dtype", "no"): f"unknown dtype 'no': {FP32}",
    ("dtype", None): "use torch.float16, torch.bfloat16 or 'auto'",
    ("level", "02"): "use one of O0, O1, O2, O3 (the letter O, then a digit)",
    ("level", 2): "use one of O0, O1, O2, O3 (the letter O, then a digit)",
    ("loss_scale", 0): "must be positive and finite",
    ("loss_scale", float("nan")): "must be positive and finite",
    ("loss_scale", "static"): "use 'dynamic', 'grad_scaler', 'none', a number, or a LossScale",
    ("loss_scale", torch.amp.GradScaler("cpu")): "leave the GradScaler out of the loop, too",
    ("loss_scale", "dynamc"): "did you mean 'dynamic'",
    ("pad", "alway"): "did you mean 'always'?",
    ("pad", True): "pad=True: use one of auto, always, never",
    ("emit", "cudagraphs"): "emit='cudagraphs': use one of inductor, aot_eager, eager",
    ("dump", __file__): "can't be made a directory",
    ("dump", True): "dump=True: give the path of a directory",
    ("strict", None): "strict=None: use True or False",
    ("dynamic", "yes"): "dynamic='yes': use True or False",
    ("fullgraph", "yes"): "fullgraph='yes': use True or False",
    ("mode", "max_autotune"): "mode='max_autotune': Unrecognized mode=max_autotune, should be one",
    ("disable_passes", ("plan_pad",)): "no pass 'plan_pad'; did you mean 'plan_pads'?",
    ("policy", "fp32"): "a policy file ends in .toml or .json, and 'fp32' does not",
    ("policy", "none.toml"): "can't read the policy file none.toml: No such file",
    ("backend", "inductor"): "mpcompile() is the backend; choose what runs below it with emit=",
    # words of others
    ("precision", "16-mixed"): LOW,
    ("mixed_precision", "fp16"): LOW,
    ("fp16", True): LOW,
    ("autocast", True): LOW,
    ("opt_level", "O1"): "that is level='O0' to 'O3'",
    ("enabled", False): "level='O0' leaves everything in FP32",
    ("device", "cuda"): "it runs where the parameters are: model.to(device)",
    ("optimizer", None): "an optimizer is taken as it is; MPOptimizer(optimizer) compiles its step",
    ("max_grad_norm", 1.0): "MPOptimizer(optimizer, max_grad_norm=...)",
    ("init_scale", 1024): "loss_scale=LossScale.dynamic(...) takes it",
    ("grad_scaler", None): "loss_scale='dynamic' is on by itself",
    ("keep_batchnorm_fp32", True): "norms compute in FP32 at O1 and O2",
    ("master_weights", True): "parameters stay in FP32: they are the masters",
    ("accumulate_grad_batches", 4): "or by train_step(..., accumulate=...)",
    ("max_autotune", True): "Inductor's go into a dict, options={...}",
    ("dynmic", True): "did you mean 'dynamic'?; known: dtype, level,",
}


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_an_option(name: str, value: Any) -> None:
    options = {name: value}
    with pytest.raises(MPCompileError, match=re.escape(VALUES[name, value])) as caught:
        mpcompile(Net(), **options)
    assert name in str(caught.value) or "LossScale" in str(caught.value)
    assert "model," not in str(caught.value)  # it is no option


def modules(word: str, precision: str = "fp32") -> Mistake:
    return functools.partial(with_policy, modules={word: precision})


MISTAKES: dict[str, tuple[Mistake, str]] = {
    # what is compiled
    "None": (lambda: mpcompile(None), "mpcompile(None): give an nn.Module or a function. Does the"),
    "None with options": (lambda: mpcompile(None, level="O2"), "function that makes it return it?"),
    "class": (
        lambda: mpcompile(nn.Linear),
        "this is a class; give an instance, such as mpcompile(",
    ),
    "the module": (lambda: mp(Net()), "from mpcompile import mpcompile"),
    "list": (
        lambda: mpcompile([Net()]),
        "mpcompile(list): give an nn.Module or a function, each by",
    ),
    "an optimizer": (lambda: mpcompile(sgd(Net())), "MPOptimizer(optimizer) compiles the step"),
    "as in Apex": (
        lambda: mpcompile(model := Net(), sgd(model), level="O1"),
        "mpcompile(Net, SGD): no optimizer is handed over; MPOptimizer(optimizer) compiles its",
    ),
    "level by place": (lambda: mpcompile(Net(), "O2"), "options have names, as level='O2'"),
    "two models": (lambda: mpcompile(Net(), Net()), "give one model; each is compiled by itself"),
    "name": (lambda: mpcompile("gpt2"), "mpcompile(str): give an nn.Module or a function"),
    "half": (lambda: mpcompile(Net().half()), "already in half precision"),
    "other half": (
        lambda: mpcompile(Net().bfloat16(), dtype="fp16"),
        "is stored in bfloat16, and the low dtype is float16. Weights in half precision are read "
        "as they are: compile with dtype='bfloat16'",
    ),
    "double": (lambda: mpcompile(Net().double()), "call model.float() first"),
    "meta": (lambda: mpcompile(nn.Linear(4, 4, device="meta")), "supported devices: cuda, cpu"),
    "complex": (lambda: mpcompile(nn.Linear(4, 4, dtype=torch.complex64)), "nothing to do in FP16"),
    "options of ours": (
        lambda: mpcompile(Net(), options={"level": "O2"}),
        "options={'level': 'O2'} are Inductor's; level= is an option beside it",
    ),
    "options of theirs": (
        lambda: mpcompile(Net(), options={"max_autotunee": True}),
        "Unexpected optimization option max_autotunee; did you mean 'max_autotune'?",
    ),
    "mode without Inductor": (
        lambda: mpcompile(Net(), mode="max-autotune", emit="eager"),
        "mode='max-autotune' is Inductor's",
    ),
    "options in a list": (
        lambda: mpcompile(Net(), options=["max_autotune"]),
        "give a dict of Inductor's options",
    ),
    # policies
    "near": (modules("fc_1"), "'fc_1' matches no module; did you mean 'fc1'?; the modules of Net:"),
    "prefix": (modules("model.fc1"), "did you mean 'fc1'?"),
    "kind": (modules("LayerNorm"), "it is a class, and what is searched are paths, as norm"),
    "glob": (modules("*fc"), "bad regex '*fc': nothing to repeat at position 0; it is no glob"),
    "object": (lambda: Policy(modules={nn.LayerNorm: "fp32"}), "give a dict, name -> precision"),
    "a number of nodes": (lambda: Policy(nodes={1: "fp32"}), "give a dict, name -> precision"),
    "FP16": (modules("fc1", "fp16"), "Policy(modules={'fc1': 'fp16'}): FP16 gradients need a loss"),
    "a node": (lambda: with_policy(nodes={"linear": "FP16"}), "FP16 gradients need a loss scale"),
    "FP64": (modules("fc1", "fp64"), "use 'low', 'fp32' or 'keep'"),
    "in two": (lambda: with_policy(low=["mm"], full=["aten.mm"]), "in both"),
    "one text": (lambda: Policy(low="mm"), "give a collection"),
    "a number": (lambda: Policy(low=[3]), "not an operator"),
    "class of modules": (lambda: Policy(full=[nn.LayerNorm]), "did you mean 'layer_norm'?"),
    "function": (lambda: Policy(full=[F.softmax]), "did you mean 'softmax'?"),
    "operator": (lambda: with_policy(full=["torch.softmax"]), "no operator 'torch::softmax'; did"),
    "policy as dict": (
        lambda: mpcompile(Net(), policy={"low": ["mm"]}),
        "give an mpcompile.Policy(",
    ),
    # loss scales
    "LossScale": (lambda: LossScale(), "make one by LossScale.dynamic(init_scale=...)"),
    "as GradScaler": (lambda: LossScale(init_scale=1024.0), "LossScale.dynamic(init_scale=...)"),
    "scale of a plain model": (lambda: loss_scale_of(Net()), "was not compiled by mpcompile(...)"),
    "plans of a plain function": (
        lambda: compiled_plans(F.relu),
        "mpcompile(function) returns the compiled one: ask that",
    ),
    # MPOptimizer
    "model first": (lambda: MPOptimizer(model := Net(), sgd(model)), "give the optimizer alone"),
    "class of optimizers": (
        lambda: MPOptimizer(torch.optim.AdamW),
        "MPOptimizer(class AdamW): give",
    ),
    "no optimizer": (lambda: MPOptimizer(None), "MPOptimizer(None): give a torch.optim optimizer"),
    "lr": (lambda: wrapped(lr=0.1), "MPOptimizer(torch.optim.SGD(model.parameters(), lr=...))"),
    "level there": (
        lambda: wrapped(level="O2"),
        "an option of the model, mpcompile(model, level=...)",
    ),
    "max_norm": (lambda: wrapped(max_norm=1.0), "did you mean 'max_grad_norm'?"),
    "scale there": (
        lambda: wrapped(loss_scale=1024),
        "give a LossScale, as LossScale.static(1024.0)",
    ),
    "dump there": (lambda: wrapped(dump=3), "dump=3: give the path of a directory"),
    "twice": (lambda: MPOptimizer(wrapped()), "wrap the torch.optim optimizer once"),
    "state of a model": (
        lambda: wrapped(emit="eager").load_state_dict(Net().state_dict()),
        "are not the keys of an optimizer's state. Is it that of the model?",
    ),
    # train_step
    "swapped": (lambda: stepping(model=sgd(Net())), "give an nn.Module and an optimizer"),
    "class of losses": (
        lambda: stepping(loss_fn=nn.CrossEntropyLoss),
        "CrossEntropyLoss is a class; give an instance, CrossEntropyLoss()",
    ),
    "loss by name": (lambda: stepping(loss_fn="mse"), "loss_fn='mse' is not callable"),
    "another model's": (
        lambda: stepping(optimizer=sgd(Net())),
        "the optimizer holds no parameter of the model, and would train nothing",
    ),
    "LBFGS": (
        lambda: stepping(model=(model := Net()), optimizer=torch.optim.LBFGS(model.parameters())),
        "LBFGS runs the model inside of its step",
    ),
    "lr for the optimizer": (lambda: stepping(optimizer=0.1), "give an nn.Module and an optimizer"),
    "accumulate": (lambda: stepping(accumulate=0), "accumulate=0; give 1 or more"),
    "accumulate or not": (lambda: stepping(accumulate=True), "accumulate=True; give 1 or more"),
    "accumulate as a float": (lambda: stepping(accumulate=2.0), "accumulate=2.0; give 1 or more"),
    "accumulate by another word": (
        lambda: stepping(gradient_accumulation_steps=2),
        "unknown option 'gradient_accumulation_steps': accumulate as in plain PyTorch, or by train",
    ),
    # studies
    "explain a class": (lambda: explain(Net, X), "explain(class Net): give an nn.Module"),
    "explain nothing": (lambda: explain(Net()), "can't be called so: missing a required argument"),
    "explain by cuda": (
        lambda: explain(Net(), X, device="cuda"),
        "unknown GPU 'cuda': where none is named, the plan is for the device that the model is on",
    ),
    "a device": (
        lambda: plan_for(Net(), X, device=torch.device("cpu")),
        "unknown GPU device(type=",
    ),
    "a GPU": (lambda: plan_for(Net(), X, device="rtx3080"), "did you mean 'rtx3090'?; known: b200"),
    "why": (lambda: explain(Net(), X).why("fc9"), "no node and no module 'fc9'; did you mean 'fc"),
    "diagnose by name": (
        lambda: diagnose(Net(), X, loss_fn="ce"),
        "loss_fn='ce' is not a function",
    ),
    "two arguments": (
        lambda: diagnose(Net(), X, loss_fn=F.mse_loss),
        "is called as loss_fn(result)",
    ),
    "detached": (
        lambda: diagnose(Net(), X, loss_fn=lambda out: out.detach().sum()),
        "a tensor of shape () without a gradient: it must make one number with a gradient",
    ),
    "calibrate on a tensor": (lambda: calibrate(Net(), X), "give several, such as a DataLoader or"),
    "calibrate on None": (lambda: calibrate(Net(), None), "batches=None: give several"),
    "calibrate with targets": (
        lambda: calibrate(Net(), [(X, X)]),
        "If a batch holds the targets, too, give loss_fn, as `lambda model, batch:",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call(name: str) -> None:
    mistake, words = MISTAKES[name]
    with pytest.raises(MPCompileError, match=re.escape(words)):
        mistake()


def test_the_backend_says_the_same() -> None:
    """Within what torch puts around it."""
    for options, words in (
        ({"levle": "O2"}, "unknown option 'levle'; did you mean 'level'?"),
        ({"max_autotune": True}, "Inductor's go into a dict, options={...}"),
        ({"level": "O9"}, "use one of O0, O1, O2, O3"),
    ):
        model: Any = compile_by_torch(
            Net(), backend="mpcompile", options={"emit": "eager", **options}
        )
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(words)):
            model(X)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="the backend is a word"):
        compile_by_torch(Net(), backend=mpcompile)(X)


OURS = ["mpcompile.runtime.x", "torch._dynamo.x", "lightning.pytorch.x", "functools", None]


@pytest.mark.parametrize(("name", "is_ours"), [*((m, True) for m in OURS), ("theirs.x", False)])
def test_a_warning_names_the_users_line(name: str | None, is_ours: bool) -> None:
    """The innermost one; code that torch has made has no module."""
    scope: dict[str, Any] = {"warn": warn} if name is None else {"warn": warn, "__name__": name}
    exec("def inner():\n    warn('said')\ndef outer():\n    inner()", scope)
    with pytest.warns(MPCompileWarning, match="said") as caught:
        scope["outer"]()
    assert caught[0].filename == (__file__ if is_ours else "<string>")
