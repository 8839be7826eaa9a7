"""Import before torch: one thread a process, and the fast matrix kernels of OpenBLAS.

OpenBLAS knows processors by model number and takes one that it does not know for a very old one,
which costs a factor of four; the instruction sets the processor names decide here instead."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
with open("/proc/cpuinfo") as f:
    _flags = f.read().split()
for _flag, _core in (("avx512f", "SkylakeX"), ("avx2", "Haswell")):
    if _flag in _flags:
        os.environ.setdefault("OPENBLAS_CORETYPE", _core)
