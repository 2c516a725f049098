# SPDX-License-Identifier: Apache-2.0
"""`aeon-ddtree ddtree-tree-test`: the installed tests of tree, verify, commit and the kernels' references.

They need no GPU, no model, no network and no writable folder but a temporary one.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click

from .failure import Refusal

PACKAGE = "aeon_ddtree_tests"
AREAS = ("tree", "verify", "commit", "kernels")
# The pytest plugins that the tests need, by module: what else is installed beside them does not take part.
PLUGINS = ("_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin")
# Tests of the Triton kernels run in `make test`: under Triton's interpreter they take minutes.
LEFT_OUT = ("test_*_triton.py", "test_interpreter.py")
MARKERS = "not engine and not gpu and not slow"
SECONDS_PER_TEST = 100


class Tally:
    """A pytest plugin that counts outcomes: area -> outcome -> number of tests."""

    def __init__(self) -> None:
        self.areas: dict[str, Counter[str]] = defaultdict(Counter)
        self.failures: list[str] = []

    def add(self, node: str, outcome: str) -> None:
        area = next((part for part in node.split("::")[0].split("/") if part in AREAS), "other")
        self.areas[area][outcome] += 1
        if outcome in ("failed", "error"):
            self.failures.append(node)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.outcome != "skipped":
            self.add(report.nodeid, report.outcome)
        elif report.outcome == "skipped":
            self.add(report.nodeid, "skipped")
        elif report.outcome == "failed":
            self.add(report.nodeid, "error")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.add(report.nodeid, "error")

    def total(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.areas.values())

    def sentence(self) -> str:
        """Such as '468 passed, 0 failed, 6 skipped'; errors are named only when there are any."""
        parts = [f"{self.total('passed')} passed", f"{self.total('failed')} failed", f"{self.total('skipped')} skipped"]
        if errors := self.total("error"):
            parts.append(f"{errors} errors")
        return ", ".join(parts)


def tests_folder() -> Path:
    """Where the tests are installed: in the wheel's package, or tests/ of the source tree. Raises Refusal."""
    for candidate in (Path(__file__).resolve().parents[1] / PACKAGE, Path(__file__).resolve().parents[1] / "tests"):
        if all((candidate / area).is_dir() for area in AREAS):
            return candidate
    raise Refusal(f"ddtree-tree-test: the package {PACKAGE} is not installed; install the project's wheel")


def require_tools() -> None:
    modules = ["torch", "pytest", *(name.split(".")[0] for name in PLUGINS)]
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        cure = "install aeon-ddtree with its dependencies"
        raise Refusal(f"ddtree-tree-test: no module named {', '.join(missing)}; {cure}")


def isolate(scratch: Path) -> None:
    """To be called before torch and pytest are imported: all is written to `scratch`, no settings of the user count."""
    sys.dont_write_bytecode = True
    for variable in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_AUTO_NUM_WORKERS"):
        os.environ.pop(variable, None)
    os.environ |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        # The tensors are small: one thread each is fastest, and the workers share the cores.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def workers(wanted: int | None) -> int:
    """Processes to run in: as many as cores, at most four; 0 (this process) for one core."""
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(cores, 4)
    return wanted if wanted > 1 else 0


def arguments(folder: Path, scratch: Path, processes: int, keyword: str | None, extra: tuple[str, ...]) -> list[str]:
    """pytest's arguments; `extra` comes last and so wins."""
    options = {
        "testpaths": "",
        "addopts": "",
        "xfail_strict": "true",
        "timeout": str(SECONDS_PER_TEST),
        "filterwarnings": "ignore::DeprecationWarning\nignore::UserWarning",
        "markers": "engine: starts a vLLM engine\nslow: takes minutes\ngpu: needs a CUDA device",
    }
    plugins = [argument for name in PLUGINS for argument in ("-p", name)]
    return [
        *(str(folder / area) for area in AREAS),
        *("-c", os.devnull, f"--rootdir={folder}", f"--confcutdir={folder}", f"--basetemp={scratch / 'tests'}"),
        *(argument for name, value in options.items() for argument in ("-o", f"{name}={value}")),
        *("-p", "no:cacheprovider", *plugins, "-n", str(processes), "-q", "--strict-markers", "-m", MARKERS),
        *(f"--ignore-glob={folder}/*/{pattern}" for pattern in LEFT_OUT),
        *(["-k", keyword] if keyword else []),
        *extra,
    ]


def version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def run(scratch: Path, processes: int, keyword: str | None, extra: tuple[str, ...]) -> tuple[int, Tally]:
    isolate(scratch)
    import pytest

    tally = Tally()
    code = pytest.main(arguments(tests_folder(), scratch, processes, keyword, extra), plugins=[tally])
    return int(code), tally


@click.command("ddtree-tree-test")
@click.option("-k", "keyword", metavar="EXPRESSION", help="Only tests whose names match, as pytest's -k.")
@click.option("-n", "--workers", "wanted", type=click.IntRange(0, 64), help="Processes [one per core, at most 4].")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout; pytest's own output on stderr.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGS...]")
def tree_test(keyword: str | None, wanted: int | None, as_json: bool, extra: tuple[str, ...]) -> None:
    """Test tree, verify, commit and the kernels' references on this CPU: no model, no network, under two minutes.

    Exit code: pytest's; 0 when every selected test passed, 5 when none was selected.
    """
    require_tools()
    processes = workers(wanted)
    if not as_json:
        where = f"{processes} processes" if processes else "one process"
        click.echo(f"ddtree-tree-test: {', '.join(AREAS)} with torch {version('torch')} in {where}")
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddtree-tree-test-")))
        except OSError as error:
            raise Refusal(f"ddtree-tree-test: no temporary folder ({error}); set TMPDIR to a writable one") from error
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        code, tally = run(scratch, processes, keyword, extra)
    seconds = time.monotonic() - start
    if as_json:
        result = {
            "passed": code == 0,
            "exit_code": code,
            "seconds": round(seconds, 1),
            "counts": {name: tally.total(name) for name in ("passed", "failed", "error", "skipped")},
            "areas": {area: dict(tally.areas[area]) for area in (*AREAS, "other") if tally.areas[area]},
            "failures": tally.failures,
            "versions": {
                "aeon-ddtree": version("aeon-ddtree"),
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            "machine": platform.machine(),
        }
        click.echo(json.dumps(result, indent=2))
    else:
        for area in AREAS:
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(tally.areas[area].items()))
            click.echo(f"  {area:8} {counts or 'nothing selected'}")
        for node in tally.failures:
            click.echo(f"  failed   {node}")
        ran = tally.total("passed") + len(tally.failures)
        verdict = "FAILED" if code not in (0, 5) else "PASSED" if ran else "NOTHING RAN"
        click.echo(f"ddtree-tree-test: {verdict} in {seconds:.0f} s")
        click.echo(tally.sentence())
    sys.exit(code)
