"""A policy in a file says what the policy says, and a file that says nonsense is refused."""

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from module_of import module_of
from repository import ROOT
from torch import nn

from mpcompile import MPCompileError, Policy, Precision, compiled_plans, mpcompile, plan_for
from mpcompile import __version__ as version

GUIDE = ROOT / "docs" / "policy.md"
SUFFIXES = (".toml", ".json")
both = pytest.mark.parametrize("suffix", SUFFIXES)

WORDS = ("fp32", "low", "keep", "bf16", "fp16", Precision.FULL, Precision.LOW, Precision.KEEP)
words = st.sampled_from(WORDS)
# All characters but surrogates, which UTF-8 has not; and those that TOML, JSON or regexes quote.
names = st.text() | st.text("\"'\\#=.[]^$ \t\r\n\x00\x7f\x85\u2028\ufeffλa")


def is_regex(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(text)
    except (re.error, OverflowError, Warning):
        return False
    return True


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Random ones; the three sets have no operator in common."""
    ops = draw(st.dictionaries(st.text("abc_:. é").filter(bool), st.integers(0, 2), max_size=6))
    keys = {Policy(low=[name]).low: of for name, of in ops.items()}
    low, full, keep = ([*itertools.chain(*(k for k in keys if keys[k] == i))] for i in range(3))
    regexes = names.map(re.escape) | names.filter(is_regex) | st.just(r"^layers\.\d+\.fc[12]$")
    pins = (draw(st.dictionaries(of, words, max_size=6)) for of in (regexes, names))
    return Policy(low, full, keep, *pins)


def read_back(policy: Policy, path: Path, comments: dict[str, str] | None = None) -> Policy:
    policy.save(path, comments)
    return Policy.load(path)


@pytest.mark.slow("torch's operator table")
@both
@given(policy=policies(), reason=st.text())
@settings(deadline=None)
def test_a_round_trip_is_exact(
    suffix: str, policy: Policy, reason: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"pins{suffix}"
    for comments in ({}, dict.fromkeys([*policy.modules, *policy.nodes], reason)):
        found = read_back(policy, path, comments)
        assert (found.low, found.full, found.keep) == (policy.low, policy.full, policy.keep)
        assert list(found.modules.items()) == list(policy.modules.items())
        assert (found.nodes, found.low_dtypes) == (policy.nodes, policy.low_dtypes)
        assert found == policy
        assert hash(found) == hash(policy)


@given(policy=policies())
def test_it_prints_as_it_is_written(policy: Policy) -> None:
    assert eval(repr(policy)) == policy
    assert str(Policy()) == "Policy()"
    some = Policy(full=["gelu"], modules={"^a$": "bfloat16"}, nodes={"linear_3": Precision.LOW})
    assert str(some) == (
        "Policy(full=['aten::gelu'], modules={'^a$': 'bf16'}, nodes={'linear_3': 'low'})"
    )


def test_the_order_of_modules_is_part_of_a_policy() -> None:
    """`a.b` runs low with the one and in FP32 with the other."""
    one = Policy(modules={"a": "fp32", "b": "low"}, nodes={"m": "fp32", "n": "low"})
    other = Policy(modules={"b": "low", "a": "fp32"}, nodes={"m": "fp32", "n": "low"})
    assert one.for_module("a.b") != other.for_module("a.b")
    assert one != other
    same = Policy(modules={"a": "fp32", "b": "low"}, nodes={"n": "low", "m": "fp32"})
    assert one == same
    assert len({one, same, other}) == 2
    assert one != "Policy"
    assert Policy(nodes={"m": "fp16"}) != Policy(nodes={"m": "bf16"})


def test_the_top_of_a_file_says_which_mpcompile_wrote_it(tmp_path: Path) -> None:
    for suffix, start in ((".toml", ""), (".json", "{\n  ")):
        Policy().save(tmp_path / f"pins{suffix}")
        first = (tmp_path / f"pins{suffix}").read_text().removeprefix(start)
        assert re.match(rf'"?written_by"?( =|:) "mpcompile {re.escape(version)}"', first)


def test_reasons_stand_after_their_lines(tmp_path: Path) -> None:
    policy = Policy(modules={"^a$": "fp32"}, nodes={"linear_3": "fp32", "linear_4": "low"})
    why = {"linear_3": "amax 1.2e5\nin 3 of 10 batches", "^a$": "a square"}
    policy.save(tmp_path / "pins.toml", comments=why)
    lines = (tmp_path / "pins.toml").read_text().splitlines()
    assert lines[-6:] == [
        "[modules]",
        '"^a$" = "fp32"  # a square',
        "",
        "[nodes]",
        'linear_3 = "fp32"  # amax 1.2e5 in 3 of 10 batches',
        'linear_4 = "low"',
    ]
    assert read_back(policy, tmp_path / "pins.json", why) == policy
    for suffix in SUFFIXES:
        path = tmp_path / f"none{suffix}"
        with pytest.raises(MPCompileError, match="'linear_5', which is no entry; did you mean"):
            policy.save(path, comments={"linear_5": "?"})
        assert not path.exists()


def test_what_toml_has_no_word_for_goes_into_json(tmp_path: Path) -> None:
    lone = Policy(nodes={"\ud800": "fp32"})
    assert read_back(lone, tmp_path / "pins.json") == lone
    with pytest.raises(MPCompileError, match=r"pins\.toml: .*can't be written in TOML: save"):
        lone.save(tmp_path / "pins.toml")
    assert not (tmp_path / "pins.toml").exists()


# -- refusals --------------------------------------------------------------------------------------

REFUSED = [  # as TOML, as JSON, what is wrong
    ("low = [", '{"low": [', r"end of document|line 2 column 1"),
    ("low = []\nlow = []", '{"low": [], "low": []}', r"line 2|'low' stands there twice"),
    (
        '[nodes]\na = "low"\na = "fp32"',
        '{"nodes": {"a": "low", "a": "fp32"}}',
        r"line 3|'a' stands there twice",
    ),
    ('fulll = ["gelu"]', '{"fulll": ["gelu"]}', r"unknown key 'fulll'; did you mean 'full'\?"),
    ("low_dtypes = []", '{"low_dtypes": []}', r"unknown key 'low_dtypes'.*known: written_by, low"),
    ('low = "gelu"', '{"low": "gelu"}', r"low = 'gelu': give a list of operators' names"),
    ("low.gelu = 1", '{"low": {"gelu": 1}}', r"low = .*: give a list of operators' names"),
    ("keep = [3]", '{"keep": [3]}', r"keep = \[3\]: give a list of operators' names"),
    ('nodes = ["a"]', '{"nodes": ["a"]}', r"nodes = \['a'\]: give a table, name -> precision"),
    ("written_by = 1", '{"written_by": 1}', r"written_by = 1: give a text"),
    ("nodes.a = 16", '{"nodes": {"a": 16}}', r"nodes={'a': \.\.\.}.*unknown precision 16"),
    ('nodes.a = "fp3"', '{"nodes": {"a": "fp3"}}', r"nodes={'a'.* 'fp3'; .*you mean 'fp32'"),
    ('modules.a.b = "low"', '{"modules": {"a": {"b": "low"}}}', r"modules: 'a' is a table.*quotes"),
    ('modules."(" = "low"', '{"modules": {"(": "low"}}', r"modules=.*bad regex '\('"),
    (
        'modules."a{99999999999}" = "low"',
        '{"modules": {"a{99999999999}": "low"}}',
        r"modules=.*bad regex 'a\{9+\}'",
    ),
    ('low = ["a"]\nfull = ["a"]', '{"low": ["a"], "full": ["a"]}', r"\['aten::a'\] in both low="),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "other", "message"), REFUSED)
def test_nonsense_is_refused(toml: str, other: str, message: str, tmp_path: Path) -> None:
    for suffix, text in ((".toml", toml), (".json", other)):
        path = tmp_path / f"pins{suffix}"
        path.write_text(f"{text}\n")
        start = rf"^{re.escape(str(path))} holds no policy: "
        with pytest.raises(MPCompileError, match=start) as e:
            Policy.load(path)
        assert re.search(message, str(e.value)), str(e.value)


def test_json_that_is_no_object(tmp_path: Path) -> None:
    for text in ("[]", "null", "3"):
        (tmp_path / "pins.json").write_text(text)
        with pytest.raises(MPCompileError, match=r"pins\.json .*give an object with"):
            Policy.load(tmp_path / "pins.json")


@both
def test_files_that_cannot_be_read_or_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"pins{suffix}"
    with pytest.raises(MPCompileError, match=rf"can't read .*pins{suffix}: No such file"):
        Policy.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(MPCompileError, match=rf"pins{suffix} holds no policy: 'utf-8'"):
        Policy.load(path)
    with pytest.raises(MPCompileError, match=rf"can't write .*pins{suffix}: "):
        Policy().save(path / path.name)
    Policy().save(tmp_path / "new" / path.name)
    assert Policy.load(tmp_path / "new" / path.name) == Policy()


@pytest.mark.parametrize("name", ["pins.yaml", "pins", ""])
def test_other_endings(name: str) -> None:
    for call in (Policy.load, Policy().save):
        with pytest.raises(MPCompileError, match=rf"ends in \.toml or \.json, and '{name}' does"):
            call(name)


# -- pins ------------------------------------------------------------------------------------------


def test_pins_go_over_what_was_said() -> None:
    own = Policy(["relu"], ["gelu"], ["sin"], {"b": "bf16", "a": "low"}, {"m": "fp16", "n": "bf16"})
    pinned = own.with_pins(["m", "k"])
    assert pinned == Policy(
        ["relu"], ["gelu"], ["sin"], {"b": "bf16", "a": "low"},
        {"m": "fp32", "n": "bf16", "k": "fp32"},
    )  # fmt: skip
    assert own.nodes["m"] is Precision.LOW
    assert own.with_pins(["n"], "fp16").low_dtypes["nodes", "n"] is torch.float16
    with pytest.raises(MPCompileError, match=r"with_pins\('linear'\): give a collection"):
        own.with_pins("linear")


# -- where a policy is taken -----------------------------------------------------------------------


def net() -> Any:
    """Three layers, one after the other."""
    return module_of(lambda m, x: m.c(m.b(m.a(x))), **{name: nn.Linear(8, 8) for name in "abc"})


X = torch.ones(8, 8)


def precisions(nodes: Any) -> dict[str, str]:
    return {node.module: node.precision for node in nodes if node.op == "aten::linear"}


PINNED = {"a": "FULL", "b": "LOW", "c": "LOW"}


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    Policy(modules={"^a$": "fp32"}).save(tmp_path / "pins.toml")
    return tmp_path / "pins.toml"


@pytest.mark.parametrize("spelled", [str, Path])
def test_mpcompile_and_plan_for_take_a_path(spelled: Any, pins: Path) -> None:
    (graph,) = plan_for(net(), X, policy=spelled(pins)).graphs
    assert precisions(graph.nodes) == PINNED
    (pinned,) = (n for n in graph.nodes if (n.module, n.op) == ("a", "aten::linear"))
    assert pinned.reason.startswith("policy: module '^a$'")
    model = mpcompile(net(), emit="eager", policy=spelled(pins))
    pins.unlink()  # it was read at the call, not when a graph is compiled
    model(X).sum().backward()
    (graph,) = compiled_plans(model)
    assert precisions(graph.nodes) == PINNED


def test_a_decorator_reads_its_file_once(pins: Path) -> None:
    decorate = mpcompile(emit="eager", policy=pins)
    pins.unlink()
    assert decorate(lambda x: net()(x))(X).shape == (8, 8)


def test_the_backend_takes_a_path(pins: Path, tmp_path: Path) -> None:
    options = {"emit": "eager", "policy": str(pins), "dump": tmp_path / "dump"}
    torch.compile(net(), backend="mpcompile", options=options)(X).sum().backward()
    (plan,) = (tmp_path / "dump").rglob("plan.json")
    nodes = json.loads(plan.read_text())["nodes"]
    assert {n["module"]: n["precision"] for n in nodes if n["op"] == "aten::linear"} == PINNED


@both
def test_an_operator_that_is_none(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"pins{suffix}"
    Policy(full=["gelo"]).save(path)
    with pytest.raises(MPCompileError, match=rf"pins{suffix}: no operator 'aten::gelo'; did you"):
        mpcompile(net(), policy=path)


@pytest.mark.parametrize("policy", [{}, 0, ["pins.toml"]])
def test_what_is_neither(policy: Any) -> None:
    with pytest.raises(MPCompileError, match=r"give an mpcompile\.Policy\(\.\.\.\), or the path"):
        mpcompile(net(), policy=policy)


def test_the_file_in_the_guide(tmp_path: Path) -> None:
    """It says what the policy above it says."""
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "pins.toml").write_text(shown)
    (block,) = (block for block in blocks(GUIDE) if "policy = Policy(" in block)
    written = re.search(r"^policy = (Policy\(.*?^\))", block, re.M | re.S)
    assert Policy.load(tmp_path / "pins.toml") == eval(written[1])
