"""Import before torch: one thread a process, and the fast matrix kernels of OpenBLAS.

OpenBLAS knows processors by model number and takes one that it does not know for a very old one,
which costs a factor of four; the instruction sets the processor names decide here instead.
Freed memory is kept: given back, it would be touched afresh every step, which on a virtual machine
costs more than the arithmetic. Only processes started from this one notice that."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
with open("/proc/cpuinfo") as f:
    _flags = f.read().split()
for _flag, _core in (("avx512f", "SkylakeX"), ("avx2", "Haswell")):
    if _flag in _flags:
        os.environ.setdefault("OPENBLAS_CORETYPE", _core)
for _name, _value in (("MMAP_MAX", "0"), ("TRIM_THRESHOLD", "8000000000"), ("TOP_PAD", "500000000")):
    os.environ.setdefault("MALLOC_%s_" % _name, _value)
