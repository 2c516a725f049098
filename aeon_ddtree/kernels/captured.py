# SPDX-License-Identifier: Apache-2.0
"""A captured verify window as a file: what one GDN layer and one attention layer were given, and what they answered.

A file is what `torch.save` makes of {section: {name: tensor or plain value}}, and is read with weights_only. There are
G requests of W rows; slots and cache blocks are renumbered, so that only those in use are in the file.

    about      version 1, device, torch, kernels, gdn_layer, attention_layer
    tree       token, parent, depth [G, W], num_nodes [G]
    gdn        arguments of causal_conv_tree (x, conv_state, weight, bias, slots, has_state, activation) and of
               gated_delta_tree (q, k, v, a, b, A_log, dt_bias, state); answers y, out and the factors u, unit_k, c
    attention  arguments of tree_attention; answer out. The rows' own K/V stand in the cache.
    walk       sampled [G, W], max_len; answers path, path_len, bonus
    commit     path, path_len that were committed: fewer rows than the walk's under the policy flat

A model without recurrent layers has no section gdn.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

VERSION = 1
Sections = dict[str, dict[str, Any]]

_NEEDED = {
    "about": ("version", "device", "kernels"),
    "tree": ("token", "parent", "depth", "num_nodes"),
    "gdn": (
        *("x", "conv_state", "weight", "bias", "slots", "has_state", "activation", "q", "k", "v", "a", "b"),
        *("A_log", "dt_bias", "state", "y", "out", "u", "unit_k", "c"),
    ),
    "attention": (
        *("q", "k_cache", "v_cache", "block_table", "context_len", "visible", "num_rows"),
        *("scale", "window", "depth", "out"),
    ),
    "walk": ("sampled", "max_len", "path", "path_len", "bonus"),
    "commit": ("path", "path_len"),
}
_OPTIONAL = {"gdn"}


def check(sections: Any, origin: str) -> Sections:
    """The sections themselves; ValueError names what is missing. origin: the file, for the message."""
    if not isinstance(sections, dict) or sections.get("about", {}).get("version") != VERSION:
        found = sections.get("about", {}).get("version") if isinstance(sections, dict) else type(sections).__name__
        raise ValueError(f"{origin}: version is {found}, expected {VERSION}; capture the window again")
    for section, names in _NEEDED.items():
        if section not in sections and section in _OPTIONAL:
            continue
        missing = [name for name in names if name not in sections.get(section, {})]
        if missing:
            raise ValueError(
                f"{origin}: {section} lacks {', '.join(missing)}, expected a whole window; capture it again"
            )
    return sections


def save(path: Path, sections: Sections) -> None:
    """Write all of it or nothing; whoever reads `path` never sees half a file."""
    check(sections, str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as out:
            torch.save(sections, out)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: Path, device: torch.device | str = "cpu") -> Sections:
    """The window with its tensors on `device`; OSError or ValueError where there is none."""
    try:
        sections = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises whatever its reader met
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: is no captured window ({what}); give a file that DDTREE_CAPTURE_DIR made") from None
    return check(sections, str(path))
