"""The repository root is the package: launch styles, floors, what ships, what an import costs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "packages"
]
FOLDERS = [name.removeprefix("kvalloc.") for name in PACKAGES if name != "kvalloc"]
MODULES = sorted(
    file.relative_to(ROOT)
    for folder in (ROOT, *(ROOT / name.replace(".", "/") for name in FOLDERS))
    for file in folder.glob("*.py")
)


def run(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Run this Python in a fresh process; returns its output, fails with all of it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Hugging Face's `kernels`, which transformers imports, and a look at both from one process.
PROBE = """
from kernels import get_kernel
import kvalloc.kernels
assert get_kernel() == "theirs"
assert not hasattr(kvalloc.kernels, "get_kernel")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder on the path with an installed `kernels` that is not ours."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_kernel(): return 'theirs'\n")
    (package.parent / "probe.py").write_text(PROBE)
    (package.parent / "test_probe.py").write_text(f"def test_probe():{PROBE}".replace("\n", "\n  "))
    return package.parent


@pytest.mark.parametrize("style", ["-c", "-m", "-m pytest", "script"])
def test_other_peoples_kernels_stay_importable_from_the_root(style: str, site: Path) -> None:
    if style == "-c":
        run("-c", PROBE, path=site)
    elif style == "-m":
        run("-m", "probe", path=site)
    elif style == "-m pytest":
        options = ["-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", str(site)]
        out = run("-m", "pytest", *options, str(site / "test_probe.py"), path=site)
        assert "1 passed" in out
    else:
        run(str(site / "probe.py"), path=site)


def test_the_shadow_is_real(site: Path, tmp_path: Path) -> None:
    """With an `__init__.py` in kernels/ the same probe fails: why there is none."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    with pytest.raises(AssertionError, match="cannot import name 'get_kernel'"):
        run("-c", PROBE, cwd=tmp_path, path=site)
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_importing_the_library_is_light() -> None:
    books = ["contiguous", "paged", "vmm"]
    modules = ["", ".geometry", ".models", ".pages", *(f".{name}.allocator" for name in books)]
    for module in modules:
        out = run(
            "-c",
            f"import sys, kvalloc{module}\n"
            "heavy = {'torch', 'cuda', 'numba', 'triton', 'matplotlib', 'jinja2'}\n"
            "print(sorted(heavy & set(sys.modules)))",
        )
        assert out == "[]\n", f"kvalloc{module} imports {out}"


def test_every_module_imports_and_its_examples_are_true() -> None:
    names = [
        ".".join(["kvalloc", *file.with_suffix("").parts]).removesuffix(".__init__")
        for file in MODULES
        if file.name != "__main__.py"
    ]
    if find_spec("transformers") is None:  # an extra
        rooms = ("bench.cache_rounds", "questions.serve_engine", "questions.serve_model")
        needs = ("kvalloc.hf", *(f"kvalloc.experiments.{room}" for room in rooms))
        names = [name for name in names if not name.startswith(needs)]
    script = (
        "import doctest, importlib, sys\n"
        "total = failed = 0\n"
        "for name in sys.argv[1:]:\n"
        "    result = doctest.testmod(importlib.import_module(name))\n"
        "    total += result.attempted; failed += result.failed\n"
        "print(total, 'examples')\n"
        "sys.exit(failed > 0)\n"
    )
    out = run("-c", script, *names)
    assert int(out.split()[0]) >= 5, "the walker finds the examples"


def test_the_list_of_packages_is_the_list_of_folders() -> None:
    not_shipped = {"tests", "docs", "build", "dist", "out"}
    found = {
        str(file.parent.relative_to(ROOT)).replace("/", ".")
        for top in ROOT.iterdir()
        if top.is_dir() and not top.name.startswith(".") and top.name not in not_shipped
        for file in top.rglob("*.py")
        if not (top / "pyvenv.cfg").exists()  # an environment under any name
    }
    assert found == set(FOLDERS)


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "dist", "out", "venv*"
    )
    shutil.copytree(ROOT, source, ignore=unwanted)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    run("-m", "pip", "wheel", *options, "--wheel-dir", str(tmp_path), ".", cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    shipped = {name for name in names if not name.startswith(f"{info}/")}
    pages = {
        f"kvalloc/{file.relative_to(ROOT).as_posix()}"
        for file in ROOT.glob("experiments/report/templates/*")
    }
    assert len(pages) >= 4, "what the report is made of"
    modules = {f"kvalloc/{file.as_posix()}" for file in MODULES}
    assert shipped == {"kvalloc/py.typed"} | pages | modules
    assert f"{info}/licenses/LICENSE" in names
    forbidden = {"conftest.py", "noxfile.py", "setup.py", "tasks.py"}
    assert not forbidden & {file.name for file in MODULES}, "every *.py at the root ships"


def imported_rooms(file: Path) -> set[str]:
    """Top-level rooms of our package that a module imports: `vmm`, `kernels`, `contract`, …"""
    rooms = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(file.parent.parts)
            base = base[: len(base) - (node.level - 1)]
            whole = [*base, *(node.module or "").split(".")] if node.module else base
            rooms |= {whole[0]} if whole else {alias.name for alias in node.names}
    return rooms


def test_nothing_imports_upward() -> None:
    """Floors: words and pools; the backends and, beside them, kernels; experiments on top."""
    root = {file.stem for file in MODULES if len(file.parts) == 1} - {"__init__"}
    ground = root | {"pages"}
    backends = {"contiguous", "paged", "vmm"}
    allowed = {
        **{room: root for room in root},
        "pages": ground,
        **{room: ground | {room} for room in backends},
        "kernels": {"contract", "geometry", "kernels"},
        "hf": ground | backends | {"kernels", "hf"},
        "experiments": ground | backends | {"kernels", "experiments", "hf"},
    }
    wrong = [
        f"{file} imports {room}"
        for file in MODULES
        if file != Path("__init__.py")
        for room in imported_rooms(file) - allowed[file.with_suffix("").parts[0]]
    ]
    assert wrong == []


def test_inside_the_package_imports_are_relative() -> None:
    """A mix of absolute and relative imports makes two types of one class for a type checker."""
    wrong = [
        f"{file}:{node.lineno}"
        for file in MODULES
        if file != Path("__init__.py")  # pytest loads the root's by path
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if (isinstance(node, ast.Import) and any(a.name.startswith("kvalloc") for a in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and "kvalloc" in str(node.module))
    ]
    assert wrong == []
