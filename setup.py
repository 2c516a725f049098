# SPDX-License-Identifier: Apache-2.0
"""What goes into the wheel: everything else stands in pyproject.toml.

folder             installed as                  what
aeon_ddtree/       aeon_ddtree                   the package, with the weights and prompts of the proving pair
entrypoints/       aeon_entrypoints              the dispatcher
recipes/           aeon_entrypoints.recipes      data only
bench/results/     aeon_entrypoints.results      data only: the reports that recipes name in `promoted_by`
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def promotion_reports() -> list[str]:
    """Names, inside bench/results/, of the reports that recipes give as their reason for the branch policy."""
    named = re.compile(r"^\s*promoted_by:\s*bench/results/(\S+)\s*$", re.MULTILINE)
    return sorted({name for recipe in HERE.glob("recipes/*.yaml") for name in named.findall(recipe.read_text("utf-8"))})


setup(
    packages=[
        *find_packages(include=["aeon_ddtree", "aeon_ddtree.*"]),
        "aeon_entrypoints",
        "aeon_entrypoints.recipes",
        "aeon_entrypoints.results",
    ],
    package_dir={
        "aeon_entrypoints": "entrypoints",
        "aeon_entrypoints.recipes": "recipes",
        "aeon_entrypoints.results": "bench/results",
    },
    package_data={
        "aeon_ddtree.proving_ground": ["weights/**/*", "*.jsonl", "*.md"],
        "aeon_ddtree.proving_ground.corpus": ["*.json"],
        "aeon_entrypoints.recipes": ["*.yaml"],
        "aeon_entrypoints.results": promotion_reports(),
    },
    include_package_data=False,
)
