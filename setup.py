# SPDX-License-Identifier: Apache-2.0
"""What goes into the wheel: everything else stands in pyproject.toml.

folder             installed as                  what
aeon_ddtree/       aeon_ddtree                   the package, with the weights and prompts of the proving pair
entrypoints/       aeon_entrypoints              the dispatcher
recipes/           aeon_entrypoints.recipes      data only
bench/results/     aeon_entrypoints.results      data only: the reports that recipes name in `promoted_by`
tests/AREA/        aeon_ddtree_tests.AREA        what `aeon-ddtree ddtree-tree-test` runs; of tests/ itself, conftest.py
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
TESTS = "aeon_ddtree_tests"
TESTED = ("tree", "verify", "commit", "kernels")


class Build(build_py):
    """Leaves out the tests of the source tree itself, which lie in tests/ beside conftest.py."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package != TESTS or each[1] == "conftest"]


def promotion_reports() -> list[str]:
    """Names, inside bench/results/, of the reports that recipes give as their reason for the branch policy."""
    named = re.compile(r"^\s*promoted_by:\s*bench/results/(\S+)\s*$", re.MULTILINE)
    return sorted({name for recipe in HERE.glob("recipes/*.yaml") for name in named.findall(recipe.read_text("utf-8"))})


setup(
    cmdclass={"build_py": Build},
    packages=[
        *find_packages(include=["aeon_ddtree", "aeon_ddtree.*"]),
        "aeon_entrypoints",
        *(f"aeon_entrypoints.{name}" for name in find_packages("entrypoints")),
        "aeon_entrypoints.recipes",
        "aeon_entrypoints.results",
        TESTS,
        *(f"{TESTS}.{area}" for area in TESTED),
    ],
    package_dir={
        TESTS: "tests",
        "aeon_entrypoints": "entrypoints",
        "aeon_entrypoints.recipes": "recipes",
        "aeon_entrypoints.results": "bench/results",
    },
    package_data={
        "aeon_ddtree.proving_ground": ["weights/**/*", "*.jsonl", "*.md"],
        "aeon_ddtree.proving_ground.corpus": ["*.json"],
        "aeon_entrypoints.recipes": ["*.yaml", "*.json"],
        "aeon_entrypoints.results": promotion_reports(),
    },
    include_package_data=False,
)
