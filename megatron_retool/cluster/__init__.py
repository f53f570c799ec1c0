"""The room with Ray: placement, and the processes that work for a run."""

import os

# Ray reads these when it is imported first, which happens only in this room. Its own limits are 30 s, which the start
# of its half a dozen processes exceeds on a busy host.
for _name in ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s", "RAY_py_gcs_connect_timeout_s"):
    os.environ.setdefault(_name, "90")
