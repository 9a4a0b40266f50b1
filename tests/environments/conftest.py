"""No network and no telemetry, and where the test packages are."""

import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VF_LOG_LEVEL": "ERROR"}
# `verifiers:echo-environment` is found like an installed package, also in the processes of a run.
_here = str(Path(__file__).parent / "packages")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_here, os.environ.get("PYTHONPATH"))))
