# SPDX-License-Identifier: Apache-2.0
"""A made-up pair of models, a recipe for it, and the dispatcher called in this process with the start caught."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from aeon_entrypoints import cli

TARGET = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"vocab_size": 4096, "hidden_size": 256}}
TARGET["text_config"]["num_hidden_layers"] = 8
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 3, 5, 6], "mask_token_id": 4095},
}


def safetensors_file(*shape: int) -> bytes:
    """A file of one tensor, the drafter's projection: the header's length, the header, the tensor (bfloat16 zeros)."""
    size = 2 * math.prod(shape)
    header = json.dumps({"fc.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@dataclass
class Setup:
    """One made-up deployment. Its parts may be changed before `recipe_file()` writes the recipe."""

    root: Path
    recipe: dict[str, Any]

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"

    def recipe_file(self) -> Path:
        file = self.root / "pair.yaml"
        file.write_text(yaml.safe_dump(self.recipe), encoding="utf-8")
        return file

    def projection(self, *shape: int) -> None:
        """Writes the drafter's weights anew, with a projection of this shape."""
        (self.drafter / "model.safetensors").write_bytes(safetensors_file(*shape))

    def configure(self, model: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Applies `change` to the configuration of "target" or "drafter"."""
        file = self.root / model / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        change(config)
        file.write_text(json.dumps(config), encoding="utf-8")

    def promote(self, **changes: Any) -> None:
        """A parity report beside the recipe, named by its mode ddtree."""
        report = {
            "kind": "parity", "passed": True, "recipe": "pair", "dtype": "float32",
            "pair": {name: str(self.recipe[name]) for name in ("model", "drafter")},
            "settings": {"commits": ["flat", "branch"]},
        } | changes  # fmt: skip
        (self.root / "report.json").write_text(json.dumps(report), encoding="utf-8")
        self.recipe["modes"]["ddtree"]["promoted_by"] = "report.json"


@pytest.fixture
def pair(tmp_path: Path) -> Setup:
    for name, config in (("target", TARGET), ("drafter", DRAFTER)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.safetensors").write_bytes(safetensors_file(256, 4 * 256))
    recipe = {
        "recipe_version": 1,
        "name": "pair",
        "description": "made up",
        "model": str(tmp_path / "target"),
        "drafter": str(tmp_path / "drafter"),
        "defaults": {"device": "cpu", "port": 0, "host": "127.0.0.1"},
        "modes": {"baseline": {}, "dflash": {}, "ddtree": {"ddtree": {"budget": 31}}, "unsafe-full-branch": {}},
    }
    return Setup(tmp_path, copy.deepcopy(recipe))


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    started: list[str] | None
    environ: dict[str, str] | None
    watched: dict[str, Any] | None = None

    def flag(self, name: str) -> str:
        """The value that follows `name` in the command that was started."""
        assert self.started is not None, self.err
        assert self.started.count(name) == 1, self.started
        return self.started[self.started.index(name) + 1]

    def options(self) -> dict[str, Any]:
        return json.loads(self.flag("--additional-config"))["ddtree"]


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Calls `aeon-ddtree ARGUMENTS`; what it would have become is in `started` and `environ`."""

    def call(*arguments: object) -> Outcome:
        caught: list[tuple[list[str], dict[str, str]]] = []
        watched: list[dict[str, Any]] = []
        monkeypatch.setattr("sys.argv", ["aeon-ddtree", *map(str, arguments)])
        monkeypatch.setattr("os.execvpe", lambda _file, argv, environ: caught.append((argv, environ)))
        # It would watch this very process.
        monkeypatch.setattr("aeon_entrypoints.watch.begin", lambda *_, **told: watched.append(told))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        streams = capsys.readouterr()
        argv, environ = caught[0] if caught else (None, None)
        code = code if isinstance(code, int) else 0
        return Outcome(code, streams.out, streams.err, argv, environ, watched[0] if watched else None)

    return call
