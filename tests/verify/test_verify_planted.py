"""A compiler that computes wrong, C++'s or Inductor's for a GPU: trainings end as in FP32, with one
warning that names the line. And a program that could seem wrong, and isn't.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from module_of import module_of
from ranks import on_each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpcompile as package
from mpcompile import MPCompileError, MPCompileWarning, MPOptimizer, mpcompile, train_step
from mpcompile.optim import optimizer as mp_optimizer
from mpcompile.settings import Settings
from mpcompile.whole_step.update import FEW, emit_late

WRONG = Path(__file__).parents[1] / "support" / "wrong_cxx.sh"


def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(net.first(x))
    hidden = hidden + torch.tanh(net.second(hidden)) * torch.exp(-hidden)
    return net.last(hidden)


def made() -> nn.Module:
    torch.manual_seed(0)
    first, second, last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
    return module_of(forward, first=first, second=second, last=last)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator))


def trained(
    model: nn.Module, how: str, options: dict[str, Any] | None = None
) -> tuple[list[float], Any]:
    """The losses, and what has the plans."""
    device = next(model.parameters()).device
    x, y = (value.to(device) for value in batch())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if how == "MPOptimizer":
        optimizer = MPOptimizer(optimizer, options=options)
    step = train_step(model, optimizer, F.cross_entropy) if how == "train_step" else None
    losses = []
    for _ in range(4):
        if step is not None:
            losses.append(step(x, y).item())
        elif how == "evaluation":
            with torch.no_grad():
                losses.append(F.cross_entropy(model(x), y).item())
        else:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, step or model


def compiler(kind: str, folder: Path) -> dict[str, Any]:
    """Options of Inductor for a compiler that computes this wrongly."""
    shutil.copy(WRONG, folder / kind)
    return {"cpp.cxx": (None, str(folder / kind))}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("how", ["a plain optimizer", "MPOptimizer", "train_step", "evaluation"])
@pytest.mark.parametrize("kind", ["sum", "product", "exp"])
@pytest.mark.slow("each kernel is compiled several times: up to a minute a row")
@pytest.mark.sampled(16)
def test_a_wrong_compiler_is_seen_and_cured(
    kind: str, how: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    check(how, level, torch.device("cpu"), compiler(kind, tmp_path))


WRONG_IN_TRITON = {  # kind -> the operator of Inductor's, and what kernels get in its place
    "sum": ("add", lambda a, b: f"({a} - {b})"),
    "product": ("mul", lambda a, b: f"({a} * {b} * 1.5)"),
    "exp": ("exp", lambda x: f"libdevice.exp(-({x}))"),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("own_inductor_cache")
@pytest.mark.parametrize(
    ("how", "level"),
    [
        ("a plain optimizer", "O0"), ("a plain optimizer", "O1"), ("a plain optimizer", "O2"),
        ("MPOptimizer", "O2"), ("train_step", "O1"), ("evaluation", "O1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", WRONG_IN_TRITON)
def test_wrong_kernels_of_a_gpu_are_seen_and_cured(
    kind: str, how: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codegen.triton import TritonKernelOverrides

    operator, written = WRONG_IN_TRITON[kind]
    monkeypatch.setattr(TritonKernelOverrides, operator, staticmethod(written))
    check(how, level, torch.device("cuda"), {})


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_right_kernels_of_a_gpu_are_verified(level: str) -> None:
    """Without an alarm, which would be an error of this test."""
    model = mpcompile(made().cuda(), dtype=torch.bfloat16, level=level)
    trained(model, "a plain optimizer")
    (plan,) = package.compiled_plans(model)
    assert "forward: verified" in str(plan)
    assert "backward: verified" in str(plan)


def check(how: str, level: str, device: torch.device, options: dict[str, Any]) -> None:
    """A training with a compiler that is wrong ends as one that isn't compiled."""
    plain = "a plain optimizer" if how in ("MPOptimizer", "train_step") else how
    right, _ = trained(made().to(device), plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mpcompile(made().to(device), dtype=torch.bfloat16, level=level, options=options)
        found, has_plans = trained(model, how, options)
    assert found == pytest.approx(right, rel=0.02)
    said = [str(w.message) for w in caught if issubclass(w.category, MPCompileWarning)]
    assert len(said) == 1, said
    assert "compiled wrongly" in said[0]
    assert "test_verify_planted.py" in said[0]
    plans = package.compiled_plans(has_plans)
    assert any("compiled wrongly" in p.verification.text() for p in plans if p.verification)


@pytest.mark.slow_rows("Inductor")
@pytest.mark.parametrize("verify", [True, False])
def test_the_option(verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model = mpcompile(made(), dtype=torch.bfloat16, verify=verify)
    model(batch()[0]).square().mean().backward()
    (plan,) = package.compiled_plans(model)
    text = str(plan)
    if verify:
        assert "Compiled code: backward: verified" in text
        assert "forward: verified" in text
    else:
        assert "Compiled code: not verified: verify=False" in text


@pytest.mark.slow(
    "a compiler that is wrong has each kernel compiled several times, in two processes"
)
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_a_compiler_that_is_wrong_on_one_rank(tmp_path: Path) -> None:
    """Each rank looks at its own code and cures it: no other has to wait or to know."""
    on_each_rank(_one_is_wrong, tmp_path)


def _one_is_wrong(rank: int, folder: Path) -> None:
    own = folder / str(rank)
    own.mkdir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / "cache")
    options = compiler("sum", own) if rank else {}
    right, _ = trained(made(), "a plain optimizer")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = DistributedDataParallel(made())
        model = mpcompile(net, dtype=torch.bfloat16, options=options)
        found, _ = trained(model, "a plain optimizer")
    assert found == pytest.approx(right, rel=0.02)
    assert len([str(w.message) for w in caught if "compiled wrongly" in str(w.message)]) == rank


@pytest.mark.slow("Inductor, with a compiler that is wrong")
def test_the_option_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wrong compiler, and nobody who looks: the step is wrong."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    options = compiler("sum", tmp_path)
    found = {}
    for verify in (False, True, None):
        p = nn.Parameter(torch.ones(64))
        p.grad = torch.linspace(-1, 1, 64)
        step: Any = torch.optim.NAdam([p])
        if verify is not None:
            step = MPOptimizer(step, options=options, verify=verify)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step.step()
        assert bool(caught) is (verify is True)
        found[verify] = p.detach()
    torch.testing.assert_close(found[True], found[None])
    assert not torch.allclose(found[False], found[None])
    with pytest.raises(MPCompileError, match="verify='often'"):
        MPOptimizer(torch.optim.NAdam([p]), verify="often")


@pytest.mark.slow("Inductor, with a compiler that is wrong")
def test_a_step_after_its_graph_is_as_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    p = nn.Parameter(torch.ones(64))
    p.grad = torch.linspace(-1, 1, 64)
    asked = {"options": compiler("sum", tmp_path), "strict": True}
    late = emit_late(p.device, FEW + 1, Settings.parse(asked))
    assert late is not None
    monkeypatch.setattr(mp_optimizer, "Emit", lambda *_: late)
    step = MPOptimizer(torch.optim.NAdam([p]))
    with pytest.raises(MPCompileError, match="strict=True: compiled wrongly"):
        step.step()


# -- no false alarm --------------------------------------------------------------------------------


def counts(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A buffer that the forward writes and the program reads back."""
    net.count += 1
    return net.layer(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=["whole", "floating"])
def test_no_false_alarm(dtype: torch.dtype) -> None:
    count = nn.Buffer(torch.zeros((), dtype=dtype))
    net = module_of(counts, layer=nn.Linear(16, 16), count=count)
    model = mpcompile(net, dtype=torch.bfloat16, emit="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MPCompileWarning)
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
    assert model.count.item() == 2
