"""The site: its pages exist and are all in the menu, every public name says what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvalloc.tests.test_package import MODULES, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
API = sorted((DOCS / "api").glob("*.md"))


def test_the_menu_names_every_page_and_no_other() -> None:
    menu = re.findall(r"\b([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(menu) == PAGES


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_the_reference_names_what_there_is(page: Path) -> None:
    if page.stem == "hf" and find_spec("transformers") is None:
        pytest.skip("an extra that is not installed")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        if module == "kvalloc.kernels.paged_triton" and find_spec("triton") is None:
            continue
        assert hasattr(import_module(module), attribute), name


def test_the_reference_has_what_packages_export() -> None:
    text = "\n".join(page.read_text() for page in API)
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.M)}
    for package in ("", ".contract", ".contiguous", ".paged", ".vmm"):
        assert set(import_module(f"kvalloc{package}").__all__) <= named


def undocumented(source: str) -> Iterator[str]:
    """Public classes, functions and methods without a docstring; the module itself."""
    tree = ast.parse(source)
    if tree.body and not ast.get_docstring(tree):
        yield "the module"

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            setter = any(getattr(part, "attr", "") == "setter" for part in node.decorator_list)
            if not ast.get_docstring(node) and not setter:
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return (yield from walk(tree.body, ""))


def test_every_public_name_says_what_it_is() -> None:
    silent = {str(file): list(undocumented((ROOT / file).read_text())) for file in MODULES}
    assert {file: names for file, names in silent.items() if names} == {}


def test_a_silent_name_is_found() -> None:
    source = "class A:\n  '''A.'''\n  def b(self): ...\n  def _c(self): ...\ndef d(): '''D.'''\n"
    assert list(undocumented(source)) == ["the module", "A.b"]
