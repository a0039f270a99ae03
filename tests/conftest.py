"""What every test process needs before torch is loaded."""

import os

# Idle OpenMP threads sleep instead of spinning: workers and children share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tables are as wide as on a terminal of 80 columns, whatever the shell says.
os.environ["COLUMNS"] = "80"
