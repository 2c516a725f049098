# SPDX-License-Identifier: Apache-2.0
"""Tables of tensor addresses, so that one kernel launch serves every layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

_KEPT = 1024  # a call for one layer takes one, and a table that falls out is copied again at every step
# addresses -> (table on the device, its pinned source: an asynchronous copy may still be reading it)
_tables: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()


def address_table(layers: Sequence[Sequence[Tensor]]) -> Tensor:
    """int64 [len(layers), n]: the addresses of n tensors of each layer, on their device.

    Tables are kept by the addresses in them, so a repeated call costs no copy, and a table can never be stale. A new
    table is one asynchronous copy; it cannot be made while a CUDA graph is being captured (RuntimeError: call the same
    thing once before).
    """
    addresses = [[tensor.data_ptr() for tensor in layer] for layer in layers]
    device = layers[0][0].device
    key = (device, *(address for layer in addresses for address in layer), len(addresses))
    if key in _tables:
        _tables.move_to_end(key)
        return _tables[key][0]
    source = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("these layers were never seen before this graph capture: run the step once before it")
        source = source.pin_memory()
    table = source.to(device, non_blocking=True)
    _tables[key] = (table, source)
    while len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return table
