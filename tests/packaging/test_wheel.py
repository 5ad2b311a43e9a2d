"""The distribution as a user gets it: an sdist, the wheel built from it, an environment with that wheel."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from deep500_timing._views.findings import _machine

pytest.importorskip("build", reason="builds the distribution; part of the group `test`")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {one.name: one for one in (ROOT / "deep500_timing", *(ROOT / "adapters").glob("deep500_timing_*"))}
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
COMPILED = {
    str(pxd.relative_to(folder.parent).with_suffix("")) + EXT_SUFFIX
    for folder in PACKAGES.values()
    for pxd in folder.rglob("*.pxd")
}
HAS_COMPILER = shutil.which(shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]) is not None

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
pytestmark = [pytest.mark.slow, pytest.mark.matrix]


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment's variables that steer the build replaced by ``variables``."""
    steering = {"DEEP500_TIMING_BUILD", "DEEP500_TIMING_PURE", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in steering}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def build(target: Path, *arguments: str, source: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build distributions of ``source`` into ``target`` with this environment's tools, without network."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", target, *arguments, source)
    return run(*command, cwd=target, **variables)


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of ``folder`` that matches ``pattern``."""
    (found,) = folder.glob(pattern)
    return found


def contents(wheel: Path) -> set[str]:
    """Return the names of a wheel's files, its metadata aside."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def sources() -> set[str]:
    """Return the files of the tree's packages, named as in the wheel."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.suffix in {".py", ".pxd", ".cpp", ".csv", ".html", ".css", ".js", ".txt", ".md", ".json"}
        or path.name == "py.typed"
    }


def needed() -> set[str]:
    """Return the sources without the C types, which only a build reads."""
    return {name for name in sources() if not name.endswith(".pxd")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tree and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    result = build(folder)
    assert 0 == result.returncode, result.stderr
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel.

    It sees the packages of the environment that runs the tests, but not those installed there as
    editable, because files named ``.pth`` count only in an environment's own folder.
    """
    folder = tmp_path_factory.mktemp("environment")
    python = empty_environment(folder)
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    result = run(*install, only(dist, "*.whl"), cwd=folder)
    assert 0 == result.returncode, result.stderr
    return with_other_packages(python)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment for which README's own line was typed in a clone, without a compiler."""
    folder = tmp_path_factory.mktemp("clone")
    tree, python = copy_of_the_tree(folder / "deep500-timing"), empty_environment(folder / "environment")
    installed = [line for line in page_of("README.md").splitlines() if line.startswith("pip install")]
    assert ["pip install '.[report]'"] == installed
    assert all(installed[0] in page_of(f"docs/tutorials/{name}.md").splitlines() for name in ("pytorch", "keras"))
    pip = python.with_name("pip")
    pip.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pip --python {shlex.quote(str(python))} "$@"\n')
    pip.chmod(0o755)
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "DEEP500_TIMING_BUILD": "pure"}
    offline |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(outer_packages())}
    result = run("sh", "-c", installed[0], cwd=tree, **offline)
    assert 0 == result.returncode, result.stderr
    return with_other_packages(python)


def empty_environment(folder: Path) -> Path:
    """Make an environment without packages, and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def outer_packages() -> list[str]:
    """The folders with the packages of the environment that runs the tests."""
    return [path for path in sys.path if Path(path).name == "site-packages"]


def with_other_packages(python: Path) -> Path:
    """Let an environment see them, behind its own."""
    own = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=python.parent).stdout.strip()
    Path(own, "outer.pth").write_text("\n".join(outer_packages()) + "\n", encoding="utf-8")
    return python


def test_sdist_holds_what_a_build_needs(dist: Path) -> None:
    """The sdist carries the build hook, the licence and the three packages' sources, and nothing compiled."""
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    in_tree = {str((PACKAGES[name.partition("/")[0]] / name.partition("/")[2]).relative_to(ROOT)) for name in sources()}
    assert set() == (in_tree | {"pyproject.toml", "hatch_build.py", "LICENSE"}) - names
    assert [] == [name for name in names if name.endswith((".so", ".pyd", ".c"))]


def test_wheel_holds_three_typed_packages(dist: Path) -> None:
    """The wheel holds every module of the three packages, ``py.typed`` in each, and no other package."""
    names = contents(only(dist, "*.whl"))
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert needed() == {name for name in names if not name.endswith(EXT_SUFFIX)}


@needs_compiler
def test_wheel_is_compiled_where_a_compiler_is(dist: Path) -> None:
    """Each module with a ``.pxd`` is in the wheel compiled for this interpreter, next to its source."""
    wheel = only(dist, "*.whl")
    assert COMPILED == {name for name in contents(wheel) if name.endswith(EXT_SUFFIX)}
    if COMPILED:
        assert f"cp{sys.version_info.major}{sys.version_info.minor}" in wheel.name
        assert not wheel.name.endswith("-none-any.whl")


def test_pure_wheel_serves_every_interpreter(dist: Path, tmp_path: Path) -> None:
    """``DEEP500_TIMING_BUILD=pure`` builds a wheel without compiled code, tagged for any Python 3."""
    result = build(tmp_path, "--wheel", DEEP500_TIMING_BUILD="pure")
    assert 0 == result.returncode, result.stderr
    wheel = only(tmp_path, "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert needed() == contents(wheel)


def copy_of_the_tree(tree: Path) -> Path:
    """Copy a build's files, and nothing compiled."""
    unwanted = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    for folder in PACKAGES.values():
        shutil.copytree(folder, tree / folder.relative_to(ROOT), ignore=unwanted)
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md"):
        shutil.copy2(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def little_to_compile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree in which one module is compiled: for builds that fail to compile with any compiler."""
    tree = copy_of_the_tree(tmp_path_factory.mktemp("little") / "tree")
    stay = {"_device.pxd"}
    for path in tree.rglob("*.pxd"):
        if path.name not in stay:
            path.unlink()
    assert stay == {path.name for path in tree.rglob("*.pxd")}
    return tree


@pytest.mark.skipif(not COMPILED, reason="nothing to compile")
def test_broken_compiler_costs_a_warning(little_to_compile: Path, tmp_path: Path) -> None:
    """Without a working compiler the build says so and leaves a plain wheel."""
    result = build(tmp_path, "--wheel", source=little_to_compile, CC=str(tmp_path / "no-such-compiler"))
    assert 0 == result.returncode, result.stderr
    assert "deep500-timing: warning: could not compile deep500_timing/" in result.stderr + result.stdout
    assert only(tmp_path, "*.whl").name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(not COMPILED, reason="nothing to compile")
def test_broken_compiler_ends_a_build_that_must_compile(little_to_compile: Path, tmp_path: Path) -> None:
    """With ``DEEP500_TIMING_BUILD=compiled`` that is an error which names the remedy; no wheel is left."""
    broken = {"CC": str(tmp_path / "no-such-compiler"), "DEEP500_TIMING_BUILD": "compiled"}
    result = build(tmp_path, "--wheel", source=little_to_compile, **broken)
    assert 0 != result.returncode
    assert "install a C compiler" in result.stderr + result.stdout
    assert [] == list(tmp_path.glob("*.whl"))


def test_unknown_way_to_build_is_refused(tmp_path: Path) -> None:
    """A misspelt ``DEEP500_TIMING_BUILD`` ends the build with the values that it may have."""
    result = build(tmp_path, "--wheel", DEEP500_TIMING_BUILD="fast")
    assert 0 != result.returncode
    assert "DEEP500_TIMING_BUILD='fast' is not known; use one of auto, pure, compiled" in result.stderr + result.stdout


@needs_compiler
@pytest.mark.skipif(not COMPILED, reason="nothing to compile")
def test_editable_build_compiles_in_place(tmp_path: Path) -> None:
    """An editable build puts the compiled modules next to their sources; a later plain one removes them."""
    tree = copy_of_the_tree(tmp_path / "tree")
    before = {path for path in tree.rglob("*") if path.is_file()}
    build_editable = f"import hatchling.build; hatchling.build.build_editable({str(tmp_path)!r})"

    compiled = run(sys.executable, "-c", build_editable, cwd=tree, DEEP500_TIMING_BUILD="compiled")
    after_compiled = {path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    plain = run(sys.executable, "-c", build_editable, cwd=tree, DEEP500_TIMING_BUILD="pure")
    after_plain = {path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts}

    assert (0, 0) == (compiled.returncode, plain.returncode), compiled.stderr + plain.stderr
    assert COMPILED == {path.relative_to(tree).as_posix().removeprefix("adapters/") for path in after_compiled - before}
    assert before == after_plain


def test_installed_packages_come_from_the_wheel(environment: Path) -> None:
    """The core is imported from the wheel's environment, not from the tree, and says if it is compiled."""
    code = "import json, deep500_timing as d; print(json.dumps([d.__file__, d.compiled]))"
    result = run(environment, "-c", code, cwd=environment.parent)
    assert 0 == result.returncode, result.stderr
    file, compiled = json.loads(result.stdout)
    assert Path(file).is_relative_to(environment.parents[1])
    assert (HAS_COMPILER and bool(COMPILED)) == compiled


@pytest.mark.parametrize(
    "group", ["deep500_timing.clocks", "deep500_timing.exporters", "deep500_timing.table_sections"]
)
def test_every_entry_point_loads(environment: Path, group: str) -> None:
    """Each entry point of the installed wheel loads a class out of that wheel."""
    code = f"""
import importlib.metadata, json, sys
points = importlib.metadata.distribution("deep500-timing").entry_points.select(group={group!r})
print(json.dumps({{p.name: sys.modules[p.load().__module__].__file__ for p in points}}))
"""
    result = run(environment, "-c", code, cwd=environment.parent)
    assert 0 == result.returncode, result.stderr
    files = json.loads(result.stdout.splitlines()[-1])
    expected = {
        "deep500_timing.clocks": {"torch", "cupy", "jax"},
        "deep500_timing.exporters": {
            *("terminal", "text", "jsonl", "csv", "wandb", "mlflow"),
            *("tensorboard", "prometheus", "opentelemetry", "trackio", "comet"),
        },
        "deep500_timing.table_sections": {"layers", "pipeline"},
    }
    assert expected[group] == set(files)
    assert all(Path(file).is_relative_to(environment.parents[1]) for file in files.values())


OF_THE_MACHINE = [rule.name for rule in _machine.RULES]


def page_of(name: str) -> str:
    """A page's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def words_of(text: str) -> str:
    """The words of an output, without its numbers with their units, charts and lines."""
    bare = re.sub(r"[-+]?\b\d[\w.,:+]*( (ns|µs|ms|s|%)(?!\w))?", " ", text)
    return " ".join(re.findall(r"[A-Za-z_][\w./=()-]*", bare))


def sayings_of(shown: str) -> list[str]:
    """What a page's output says, as words: its sentences, the facts of its head, and the regions of its table."""
    rows, prose = [], ""
    for line in shown.replace("...", "").splitlines():
        text = line.strip("│├└─ ")
        if re.search(r"\S {2,}\S", text) and not re.match(r"\d  ", text):
            rows.append(re.split(" {2,}", text)[0])
        else:
            prose += f" {text}" if text else " ·"
    return [*filter(None, map(words_of, [*re.split(r" · |, |→| \d  |(?<=[a-z)])[.:;] ", prose), *rows]))]


OF_A_BUSY_MACHINE = re.compile("disturbed|machine|processor|runs$|explains|faster|step$")
"""What an output says, or not, where other programs ran as well."""


WHOLE = {"pytorch": "clone", "keras": "environment"}
"""Where each tutorial is followed to its last command; in the other place its first run is made, twice as well."""


@pytest.mark.parametrize("where", ["clone", "environment"])
@pytest.mark.parametrize(("page", "package"), [("pytorch", "torch"), ("keras", "tensorflow")])
def test_a_tutorial_followed_twice(request, tmp_path: Path, monkeypatch, page: str, package: str, where: str) -> None:
    """From a clone and from the wheel: each command ends well and says what the page shows; no run is a restart."""
    pytest.importorskip(package)
    python = request.getfixturevalue(where)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page_of(f"docs/tutorials/{page}.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(next(code for _, code in blocks if code.startswith("# train.py\n")))
    shown = dict(zip((code for _, code in blocks), (code for _, code in blocks[1:]), strict=False))
    commands = [code for language, code in blocks if language == "sh" and code[:4] != "pip "]
    if where != WHOLE[page]:
        commands = commands[:1]
    elif page == "keras":  # Of its `ab` each side once: that of PyTorch is whole, and a busy machine makes either long.
        *commands, pairs = commands
        commands += [f"deep500-timing run -- {side}" for side in pairs.split(" -- ", 1)[1].split(" --- ")]
    commands = [command.replace("ab -n 5 ", "ab -n 3 ") for command in commands]
    for again in range(2):
        for command in commands:
            done = run("sh", "-c", command, cwd=tmp_path)
            assert 0 == done.returncode, done.stderr
            assert "  Goodput is" not in done.stdout + done.stderr
            said = words_of(done.stderr + done.stdout)
            missing = [one for one in sayings_of(shown.get(command, "")) if one not in said]
            if "machine is busy" not in said and "ab -n" not in command:
                assert [] == [one for one in missing if not OF_A_BUSY_MACHINE.search(one)]
            if "--run runs/first" in command:
                assert ("so this one is first-2" in done.stderr) is bool(again)
                others = [word for rule in (*OF_THE_MACHINE, "outside-steps") for word in ("--off", rule)]
                found = run(python.with_name("deep500-timing"), "show", "--json", *others, cwd=tmp_path)
                assert "waits-for-data" == json.loads(found.stdout)["findings"][0]["rule"]
        commands = [one for one in commands if "--run" in one]
    for question in questions_of_readme() if WHOLE[page] == where == "clone" else ["show", "goodput"]:
        done = run("sh", "-c", f"deep500-timing {question}", cwd=tmp_path)
        assert 0 == done.returncode, f"{question}: {done.stderr}"
        assert "  Goodput is" not in done.stdout + done.stderr


def questions_of_readme() -> list[str]:
    """The commands of README, of the last run; but those that run a program many times."""
    asked = re.findall(r"(?:^|`)deep500-timing (?!try|ab)([^`\n]+)(?:`|\n)", page_of("README.md"), re.MULTILINE)
    return [*dict.fromkeys(re.sub(r"( RUN| --open)(?= |$)", "", one).replace("81220", "12") for one in asked)]
