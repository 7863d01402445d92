"""SGLang's server as somebody else starts it: `python -m tests.e2e.guest_server PORT MODEL`; its key by environment.

On a CPU SGLang cannot start without `fusionrl.engines.launch_server`. Of that, two things are turned off, which a
server of somebody else's lacks: its ranks, and the trainers, are met by torch's own means; and the events of a stream
tell the version of the moment.
"""

import io
import os
import sys

from fusionrl.engines import launch_server

if __name__ == "__main__":
    launch_server.install_rendezvous = launch_server.stamp_streams = lambda: None
    port, model = sys.argv[1:]
    sys.stdin = io.StringIO(os.environ["FUSIONRL_ENGINE_KEY"])
    launch_server.main(
        f"--model-path {model} --host 127.0.0.1 --port {port} --device cpu --dtype float32"
        " --attention-backend torch_batched --sampling-backend pytorch --disable-cuda-graph --disable-overlap-schedule"
        " --sleep-on-idle --max-total-tokens 16384 --max-running-requests 32 --skip-server-warmup"
        " --log-level-http warning".split()
    )
