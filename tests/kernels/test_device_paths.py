# SPDX-License-Identifier: Apache-2.0
"""Where values may not be read, the kernels take another path: it must give the same, and never wait for a device."""

import pytest
import torch
import whole_step

from aeon_ddtree.kernels import checks


@pytest.mark.parametrize("seed", range(6))
def test_device_path_on_the_cpu(monkeypatch, seed):
    """Everything the other tests prove of the CPU's path holds for the path without host reads."""
    inputs = whole_step.prepare(seed)
    wanted = whole_step.run(inputs)
    monkeypatch.setattr(checks, "reads_are_free", lambda tensor: False)
    whole_step.assert_alike(whole_step.run(inputs), wanted, 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seed", range(6))
def test_cuda_equals_the_cpu_without_a_host_synchronisation(seed):
    """Pitfall, positions: no step may need a host-side value. CUDA raises here at the first synchronising call."""
    inputs = whole_step.prepare(seed)
    wanted = whole_step.run(inputs)
    on_device = {name: value.cuda() for name, value in inputs.items()}
    whole_step.run(on_device)  # libraries may synchronise when first loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = whole_step.run(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole_step.assert_alike(got, wanted, 1e-4)
