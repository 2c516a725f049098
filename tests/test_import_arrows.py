# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (docs/architecture.md): read from the sources of every package, without importing any of them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"aeon_ddtree": ROOT / "aeon_ddtree", "aeon_entrypoints": ROOT / "entrypoints"}

# part -> parts of this project that it may import besides itself
ALLOWED = {
    "kernels": set(),
    "tree": {"kernels"},
    "verify": {"kernels", "tree"},
    "commit": {"kernels", "tree", "verify"},
    "engine": {"kernels", "tree", "verify", "commit"},
    "proving_ground": {"kernels", "tree", "verify", "commit"},
    "entrypoints": set(),
}
# part -> (module it may import all the same, whether only inside a function)
EXCEPTIONS = {
    ("proving_ground", "engine"): "the parity harness asks the engine for a decoder",
    ("proving_ground", "entrypoints"): "the parity harness finds a recipe's pair as the servers do",
    ("entrypoints", "engine"): "the dispatcher lets the engine judge DDTree's options",
    ("entrypoints", "proving_ground"): "`aeon-ddtree parity` forwards to the harness",
}
# file -> why it may import vLLM all the same, inside a function
VLLM_TOO = {"aeon_ddtree/kernels/bench/stock.py": "the bench measures the kernels that ours replace"}
HEAVY = {"torch", "vllm", "transformers", "numpy", "triton"}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    at_load: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(file: Path, package: str, root: Path) -> Iterator[Import]:
    """Absolute names of what `file` imports; at_load: outside functions and TYPE_CHECKING blocks."""
    inside = file.relative_to(root).with_suffix("").parts
    parents = [package, *inside[:-1]]

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, at_load)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield Import(file, node.lineno, module, at_load)
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}", at_load)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _type_checking(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load and not lazy)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), True)


def all_imports() -> list[Import]:
    return [
        found
        for package, root in PACKAGES.items()
        for file in sorted(root.rglob("*.py"))
        for found in imports_of(file, package, root)
    ]


def part_of_file(file: Path) -> str:
    inside = file.relative_to(ROOT).parts
    return inside[1] if inside[0] == "aeon_ddtree" and len(inside) > 2 else inside[0]


def part_of_module(module: str) -> str | None:
    names = module.split(".")
    if names[0] == "aeon_entrypoints":
        return "entrypoints"
    return names[1] if names[0] == "aeon_ddtree" and len(names) > 1 else None


def violations(imports: list[Import]) -> list[str]:
    found = []
    for each in imports:
        source, goal = part_of_file(each.file), part_of_module(each.module)
        if goal in ALLOWED and goal != source and goal not in ALLOWED.get(source, set()):
            if (source, goal) not in EXCEPTIONS:
                found.append(f"{each}: {source} may not import {goal}")
            elif each.at_load:
                found.append(f"{each}: only inside a function ({EXCEPTIONS[source, goal]})")
        top = each.module.split(".")[0]
        if top == "vllm" and source != "engine":
            reason = VLLM_TOO.get(each.file.relative_to(ROOT).as_posix())
            if reason is None:
                found.append(f"{each}: only engine imports vLLM")
            elif each.at_load:
                found.append(f"{each}: only inside a function ({reason})")
        if source == "entrypoints" and top in HEAVY and each.at_load:
            found.append(f"{each}: the dispatcher must start without it")
    return sorted(set(found))


def test_the_arrows_hold():
    imports = all_imports()
    assert {part_of_file(each.file) for each in imports} >= set(ALLOWED) - {"proving_ground"}
    assert violations(imports) == []


def test_the_packages_are_empty_where_the_dispatcher_passes_through():
    for file in (PACKAGES["aeon_ddtree"] / "__init__.py", PACKAGES["aeon_ddtree"] / "engine" / "__init__.py"):
        assert list(imports_of(file, "aeon_ddtree", PACKAGES["aeon_ddtree"])) == []


@pytest.mark.parametrize(
    ("folder", "line", "fault"),
    [
        ("aeon_ddtree/kernels/walk_tree", "from aeon_ddtree.tree import DraftTree", "kernels may not import tree"),
        ("aeon_ddtree/kernels/walk_tree", "from ...tree import draft_tree", "kernels may not import tree"),
        ("aeon_ddtree/kernels", "import aeon_ddtree.commit.plan", "kernels may not import commit"),
        ("aeon_ddtree/tree", "from ..verify import walk", "tree may not import verify"),
        ("aeon_ddtree/verify", "from aeon_ddtree import commit", "verify may not import commit"),
        ("aeon_ddtree/commit", "from aeon_ddtree.engine import runner", "commit may not import engine"),
        ("aeon_ddtree/commit", "def f():\n    import vllm.config", "only engine imports vLLM"),
        ("aeon_ddtree/kernels/bench", "def f():\n    import vllm", "only engine imports vLLM"),
        ("aeon_ddtree/kernels/bench/stock.py", "import vllm", "only inside a function"),
        ("aeon_ddtree/engine", "import aeon_entrypoints.cli", "engine may not import entrypoints"),
        ("aeon_ddtree/proving_ground", "from aeon_ddtree.engine import worker", "only inside a function"),
        ("entrypoints", "import torch", "must start without it"),
        ("entrypoints", "from aeon_ddtree.tree import TreePolicy", "entrypoints may not import tree"),
        ("entrypoints", "from aeon_ddtree.engine.options import DDTreeOptions", "only inside a function"),
    ],
)
def test_a_wrong_arrow_is_seen(folder, line, fault, monkeypatch, tmp_path):
    monkeypatch.setattr("test_import_arrows.ROOT", tmp_path)
    file = tmp_path / folder
    file = file if file.suffix else file / "planted.py"
    file.parent.mkdir(parents=True)
    file.write_text(line + "\n")
    package = "aeon_entrypoints" if folder.startswith("entrypoints") else "aeon_ddtree"
    found = violations(list(imports_of(file, package, tmp_path / folder.split("/")[0])))
    assert found and all(fault in each for each in found), found


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("aeon_ddtree/engine", "import vllm\nfrom aeon_ddtree.commit import plan"),
        ("entrypoints", "def f():\n    from aeon_ddtree.engine.options import DDTreeOptions"),
        ("aeon_ddtree/proving_ground", "def f():\n    from aeon_ddtree.engine.offline import decoder"),
        ("aeon_ddtree/commit", "from ..tree import DraftTree"),
        ("aeon_ddtree/kernels/bench/stock.py", "def f():\n    from vllm.model_executor import layers"),
    ],
)
def test_a_right_arrow_is_not(folder, line, monkeypatch, tmp_path):
    monkeypatch.setattr("test_import_arrows.ROOT", tmp_path)
    file = tmp_path / folder
    file = file if file.suffix else file / "planted.py"
    file.parent.mkdir(parents=True)
    file.write_text(line + "\n")
    package = "aeon_entrypoints" if folder.startswith("entrypoints") else "aeon_ddtree"
    assert violations(list(imports_of(file, package, tmp_path / folder.split("/")[0]))) == []
