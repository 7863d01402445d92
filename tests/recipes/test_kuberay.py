"""The KubeRay manifest, by a definition written by hand of the fields that it uses, and the checker of manifests.

KubeRay's own definition is 900 KB of somebody else's; `tools/check_crd.py` takes it from a file.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.check_crd import main, manifest_errors

REPO = Path(__file__).parents[2]
MANIFEST = REPO / "scripts" / "cluster" / "kuberay.yaml"
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
AMOUNT = {"x-kubernetes-int-or-string": True, "pattern": r"^\d+(Gi)?$"}
MAP = {"type": "object", "additionalProperties": TEXT}


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


AMOUNTS = {"type": "object", "additionalProperties": AMOUNT}
PROBE = fields(
    tcpSocket=fields("port", port={"x-kubernetes-int-or-string": True}), periodSeconds=WHOLE, failureThreshold=WHOLE
)
CONTAINER = fields(
    "name",
    **dict.fromkeys(("name", "image", "workingDir"), TEXT),
    env=items(fields("name", name=TEXT, value=TEXT)),
    resources=fields(requests=AMOUNTS, limits=AMOUNTS),
    securityContext=fields(capabilities=fields(add=items(TEXT))),
    **dict.fromkeys(("readinessProbe", "livenessProbe"), PROBE),
    volumeMounts=items(fields("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = fields(
    "name",
    name=TEXT,
    emptyDir=fields(medium=TEXT, sizeLimit=AMOUNT),
    persistentVolumeClaim=fields("claimName", claimName=TEXT),
)
TEMPLATE = fields(spec=fields("containers", containers=items(CONTAINER), volumes=items(VOLUME)))
SPEC = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields(mode={"type": "string", "enum": ["disabled", "token"]}),
    headGroupSpec=fields("template", rayStartParams=MAP, template=TEMPLATE),
    workerGroupSpecs=items(
        fields(
            *("groupName", "maxReplicas", "minReplicas", "template"),
            groupName=TEXT,
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), WHOLE),
            rayStartParams=MAP,
            template=TEMPLATE,
        )
    ),
)
SCHEMA = fields(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=SPEC)
DEFINITION = {
    "spec": {
        "group": "ray.io",
        "names": {"kind": "RayCluster"},
        "versions": [{"name": "v1", "served": True, "schema": {"openAPIV3Schema": SCHEMA}}],
    }
}


@pytest.fixture
def manifest() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load(MANIFEST.read_text(encoding="utf-8")))


def test_the_manifest_is_valid(manifest: dict[str, Any]) -> None:
    assert manifest_errors(DEFINITION, manifest) == []


def test_its_nodes_are_those_of_a_recipe(manifest: dict[str, Any]) -> None:
    """Four nodes with eight GPUs, as scripts/models/glm-4.5-air.sh takes; docs/guides/multinode.md starts it there."""
    spec = manifest["spec"]
    (workers,) = spec["workerGroupSpecs"]
    assert 1 + workers["replicas"] == 4 and workers["minReplicas"] == workers["maxReplicas"] == 3
    for group in (spec["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes == {"shm", "shared"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    (container,) = workers["template"]["spec"]["containers"]
    assert str(container["readinessProbe"]["tcpSocket"]["port"]) == workers["rayStartParams"]["node-manager-port"]
    assert spec["authOptions"] == {"mode": "token"}
    pinned = (REPO / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    assert f"\nray=={spec['rayVersion']}\n" in pinned


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("spec", "authOptions", "mode"), "open", "spec.authOptions.mode: 'open' is not one of"),
        (("spec", "rayversion"), "2.60.0", "spec: Additional properties are not allowed ('rayversion' was unexpected)"),
        (("spec", "workerGroupSpecs", 0, "minReplicas"), "3", "minReplicas: '3' is not of type 'integer'"),
        (("spec", "workerGroupSpecs", 0, "rayStartParams", "node-manager-port"), 6380, "6380 is not of type 'string'"),
        (("spec", "headGroupSpec", "template"), None, "headGroupSpec.template: None is not of type 'object'"),
        (("apiVersion",), "ray.io/v1beta1", "served are v1"),
        (("kind",), "RayJob", "it is a ray.io RayJob"),
    ],
)
def test_a_wrong_manifest_is_refused(manifest: dict[str, Any], path: tuple[Any, ...], value: object, part: str) -> None:
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert any(part in error for error in manifest_errors(DEFINITION, manifest)), manifest_errors(DEFINITION, manifest)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(DEFINITION))
    monkeypatch.setattr("sys.argv", ["check_crd.py", str(tmp_path / "crd.yaml"), str(MANIFEST)])
    assert main() == 0
    assert "73 values, 0 errors" in capsys.readouterr().out
