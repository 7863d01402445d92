"""One cluster of Ray's for the files of the group "ray": their actors are forks of a nursery, as those of a run."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrl.base.environment import extended_environment
from fusionrl.base.nursery_client import FOLDER_VARIABLE, WORKER_SOCKET


@pytest.fixture(scope="package")
def shared_cluster() -> Iterator[subprocess.Popen[bytes]]:
    """Its nursery; it begins with the first file that asks for it, and ends when the next test is of another room."""
    import ray

    from fusionrl.base.nursery import Branch, Order
    from fusionrl.runtime.early_start import CLUSTER_TOKEN, make_private_folder, start_nursery
    from fusionrl.runtime.ray_cluster import start_ray

    folder = make_private_folder()
    branch = Branch(
        str(Path(folder, WORKER_SOCKET)),
        ["fusionrl.runtime.actor_process", "fusionrl.runtime.worker_imports", "pytest"],
        "tests.runtime.worker_birth:main",
        late=["RAY_JOB_ID", "RAY_RAYLET_PID"],
    )
    nursery = start_nursery(folder, Order(CLUSTER_TOKEN, [branch]).to_line())
    assert nursery.stdin is not None
    try:
        with extended_environment({FOLDER_VARIABLE: str(folder)}):
            start_ray("cpu", 1, address=None, dashboard=False)
        yield nursery
    finally:
        ray.shutdown()
        nursery.kill()
        nursery.wait()
        nursery.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)
