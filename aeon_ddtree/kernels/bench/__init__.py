# SPDX-License-Identifier: Apache-2.0
"""What the kernels cost: `python -m aeon_ddtree.kernels.bench` on a CUDA device, and their variants without one.

shapes      the models that are measured
case        a case: how its inputs are made, what it calls, what it must move, how it is checked
recurrent, attention, drafting
            the cases
stock       the kernels of vLLM that they replace, where vLLM can be imported
clock       CUDA graph replay, and the bandwidth of a copy
variants    which compiled variants the launchers ask for, recorded without a device
goals       what was promised, and whether it was met
"""
