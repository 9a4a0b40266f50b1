"""Environment of every test, set before torch is imported."""

import os

# With several processes on few cores, spinning threads cost more than they give.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines report AMX and then trap on it: bfloat16 matmuls would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
