"""One thread per process in tests: with several processes on few cores, spinning threads cost more than they give."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
