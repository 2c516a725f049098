# SPDX-License-Identifier: Apache-2.0
"""DDTREE_CAPTURE_DIR: a window of the running engine, as a file that replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aeon_ddtree.engine.decoder import Decoder, DecodeRequest, DecoderError
from aeon_ddtree.kernels import captured, replay

pytestmark = pytest.mark.engine


def start(pair: Any, budget: int = 12) -> Decoder:
    options = {"mode": "tree", "budget": budget, "commit": "branch", "spine": 2}
    return Decoder(
        str(pair.target), str(pair.drafter), options, num_speculative_tokens=budget, threads=1, skip_mm_profiling=True,
        max_model_len=256, max_num_batched_tokens=256, max_num_seqs=4, num_gpu_blocks_override=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def window(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    file = folder / "window-rank0.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CAPTURE_DIR", str(folder))
        with start(pair) as decoder:
            requests = [DecodeRequest(p, {"temperature": 0.0, "max_tokens": 16}) for p in pair.prompts[:2]]
            decoder.run(requests)
            first = file.read_bytes()
            decoder.run(requests)
            assert file.read_bytes() == first, "a window that was not taken away was overwritten"
            file.rename(folder / "taken.pt")
            decoder.run(requests)
    assert sorted(each.name for each in folder.iterdir()) == ["taken.pt", "window-rank0.pt"]
    captured.load(folder / "taken.pt")
    return file


def test_it_holds_a_window_and_replays(window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = captured.load(window)
    tree, g, a = file["tree"], file["gdn"], file["attention"]
    requests, width = tree["token"].shape
    assert requests == 2 and width == 13 and (tree["num_nodes"] == 12).all()
    assert (tree["depth"][:, 1:] > 0).all() and tree["depth"].max() < 12, "no branches"
    assert g["q"].shape[:2] == g["x"].shape[:2] == a["q"].shape[:2] == (2, 13)
    assert g["state"].shape[0] == 2 and g["state"].abs().max() > 0
    assert (a["context_len"] > 0).all() and a["k_cache"].shape[0] < 16, "blocks that no request uses"
    assert (file["walk"]["path_len"] >= 1).all() and (file["commit"]["path"][:, 0] == 0).all()
    assert replay.main([str(window), "--device", "cpu"]) == 0
    assert "answers agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "name", "wrong"),
    [
        ("gdn", "out", "gated_delta_tree out"),
        ("gdn", "y", "causal_conv_tree y"),
        ("attention", "out", "tree_attention out"),
        ("walk", "path", "walk_tree path"),
    ],
)
def test_a_wrong_answer_is_seen(
    window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, name: str, wrong: str
) -> None:
    file = captured.load(window)
    answer = file[section][name]
    answer[(-1,) * answer.ndim] += 1
    captured.save(tmp_path / "bad.pt", file)
    assert replay.main([str(tmp_path / "bad.pt"), "--device", "cpu"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(lines) == 1 and lines[0].startswith(f"{wrong} engine"), lines


def test_what_is_no_window_is_refused(window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = captured.load(window)
    del file["gdn"]["state"]
    torch.save(file, tmp_path / "part.pt")
    (tmp_path / "text.pt").write_text("no window")
    for name, words in (("part.pt", "gdn lacks state"), ("text.pt", "no captured window"), ("none.pt", "No such file")):
        assert replay.main([str(tmp_path / name), "--device", "cpu"]) == 2
        message = capsys.readouterr().err
        assert words in message and name in message and len(message.splitlines()) == 1


def test_bad_variables_end_the_start(pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before anything is served, in the worker as well as in the dispatcher."""
    monkeypatch.setenv("DDTREE_CAPTURE_DIR", str(tmp_path / "missing"))
    with pytest.raises(DecoderError, match=r"DDTREE_CAPTURE_DIR is .*missing', expected a folder"), start(pair):
        pass
