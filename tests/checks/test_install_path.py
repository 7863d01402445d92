"""Paths with white space: refused at once where Ray could not start, and taken everywhere else."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fusionrl.checks.model import unreadable_errors
from fusionrl.checks.modes import place_errors
from fusionrl.config.config import Config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", ["/home/me/my project/.venv", "/tmp/a\tb", "/srv/x\u00a0y"])
def test_white_space_in_the_path_of_the_environment_or_the_package(path: str) -> None:
    config = Config.from_flat({})
    (found,) = place_errors(config, prefix=path, package="/srv/fusionrl")
    assert repr(path) in found and "white space" in found and "--in-process" in found
    assert len(place_errors(config, prefix="/srv/venv", package=path)) == 1
    assert place_errors(config, prefix="/srv/über-ï/.venv", package="/srv/fusionrl") == []
    assert place_errors(Config.from_flat({"in_process": True}), prefix=path, package=path) == []


@pytest.mark.parametrize(("folder", "venv"), [("a b", ".venv"), ("ab", "/nowhere/a b/venv")])
def test_setup_env_refuses_it_before_it_installs(tmp_path: Path, folder: str, venv: str) -> None:
    scripts = tmp_path / folder / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup-env.sh", scripts)
    environment = {**os.environ, "FUSIONRL_VENV": venv, "FUSIONRL_ENV": "cpu"}
    command = ["bash", str(scripts / "setup-env.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 1 and "white space" in done.stderr and "a b" in done.stderr
    assert not list(scripts.parent.glob(".venv*"))


@pytest.mark.parametrize("name", ["model.safetensors", "."])
def test_files_that_the_user_may_not_read_are_named_before_the_start(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    """In a process of another user: root may read everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="closed-"))
    try:
        os.chmod(folder, 0o755)
        model = shutil.copytree(tiny_model, folder / "model")
        for path in (*model.iterdir(), model):
            path.chmod(0o755)
        (model / "README.md").symlink_to("/nowhere")
        (model / "lost+found").mkdir(mode=0o700)
        closed = model / name
        closed.chmod(0o600)
        pid = os.fork()
        if not pid:
            os.setgid(65534)
            os.setuid(65534)
            (text,) = unreadable_errors(Config.from_flat({"hf_checkpoint": str(model)}))
            os._exit(0 if str(closed.resolve()) in text and "--hf-checkpoint" in text else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert unreadable_errors(Config.from_flat({"hf_checkpoint": str(model)})) == []
    finally:
        shutil.rmtree(folder)
