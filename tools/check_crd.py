"""Check a Kubernetes manifest against a CustomResourceDefinition, without a cluster.

    python tools/check_crd.py CRD.yaml MANIFEST.yaml

The API server drops fields that it does not know, with a warning at most; here they are errors. KubeRay's definitions
are in its repository, under ray-operator/config/crd/bases.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAPI schema of Kubernetes as JSON schema, in which unknown fields are errors."""
    node = {key: value for key, value in schema.items() if not key.startswith(("x-kubernetes-", "description"))}
    if schema.get("x-kubernetes-int-or-string"):
        node.pop("type", None)
        node["anyOf"] = [
            {"type": "integer"},
            {"type": "string", **({"pattern": p} if (p := node.pop("pattern", "")) else {})},
        ]
        return node
    if "properties" in schema:
        node["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            node.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            node[key] = strict(schema[key])
    return node


def manifest_errors(definition: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """List what is wrong with a manifest, each with its path."""
    spec = definition["spec"]
    group, _, version = str(manifest.get("apiVersion")).partition("/")
    if (group, manifest.get("kind")) != (spec["group"], spec["names"]["kind"]):
        return [f"it is a {group} {manifest.get('kind')}, the definition is of {spec['group']} {spec['names']['kind']}"]
    served = {
        entry["name"]: entry["schema"]["openAPIV3Schema"] for entry in spec["versions"] if entry.get("served", True)
    }
    if version not in served:
        return [f"apiVersion {group}/{version}: served are {', '.join(served)}"]
    schema = strict(served[version])
    schema["properties"] |= {"metadata": {"type": "object", "required": ["name"]}}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def count_values(value: object) -> int:
    """Count the scalars of a manifest."""
    if isinstance(value, dict):
        return sum(map(count_values, value.values()))
    return sum(map(count_values, value)) if isinstance(value, list) else 1


def main() -> int:
    """Print what is wrong; the exit code is 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crd", type=Path)
    parser.add_argument("manifest", type=Path)
    args = parser.parse_args()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition, manifest = (yaml.load(path.read_text(encoding="utf-8"), loader) for path in (args.crd, args.manifest))
    errors = manifest_errors(definition, manifest)
    for error in errors:
        print(f"{args.manifest}: {error}", file=sys.stderr)
    print(f"{args.manifest}: {count_values(manifest)} values, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
