"""`paceline doctor`: checks of versions, devices and the machine before a run is started.

Imports no torch: its version, and the CUDA version that it was built for, are read from its files.
"""

from paceline.doctor.examine import examine
from paceline.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine"]
