"""This file is as much of kustomize as deploy/k8s uses: resources, labels, a namespace, and patches by strategic merge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "namespace", "labels", "resources", "patches"}
_MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""By which key Kubernetes merges the items of a list; other lists are replaced."""


def assemble(folder: Path) -> list[Object]:
    """Every object of a kustomization, patched. ValueError for what is not understood here, or a patch of nothing."""
    kustomization: Object = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(kustomization) - _KNOWN:
        raise ValueError(f"{folder.name} uses {', '.join(sorted(unknown))}, which is not known here")
    objects = [each for name in kustomization["resources"] for each in _resource(folder / name)]
    for patch in kustomization.get("patches", []):
        if set(patch) not in ({"patch"}, {"path"}):
            raise ValueError(f"{folder.name} has a patch with {', '.join(sorted(patch))}, which is not known here")
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        objects = patched(objects, yaml.safe_load(text))
    for each in objects:
        metadata = each["metadata"]
        if "namespace" in kustomization:
            metadata["namespace"] = kustomization["namespace"]
        for label in kustomization.get("labels", []):
            if set(label) != {"pairs"}:
                raise ValueError(f"{folder.name} has labels with more than pairs, which is not known here")
            metadata["labels"] = {**metadata.get("labels", {}), **label["pairs"]}
    return objects


def patched(objects: Sequence[Object], patch: Object) -> list[Object]:
    """The objects with one of them changed, or deleted. ValueError if the patch is of none of them."""
    places = [place for place, each in enumerate(objects) if _identity(each) == _identity(patch)]
    if len(places) != 1:
        raise ValueError(f"a patch of {_identity(patch)} finds {len(places)} objects")
    changed = list(objects)
    if patch.get("$patch") == "delete":
        del changed[places[0]]
    else:
        changed[places[0]] = merged(changed[places[0]], patch)
    return changed


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """A value with a patch over it: maps by their keys, null removing one; lists of named items by the name, the
    patch's own first; all else replaced. ValueError for a directive but `$patch: delete` of a list's item."""
    if isinstance(base, dict) and isinstance(patch, dict):
        if directives := [key for key in patch if key.startswith("$")]:
            raise ValueError(f"{field or 'the object'} is patched with {directives[0]}, which is not known here")
        changed = base | {key: merged(base.get(key), value, key) for key, value in patch.items()}
        return {key: value for key, value in changed.items() if patch.get(key, ...) is not None}
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        return _merged_items(base, patch, _MERGE_KEYS[field])
    return patch


def _merged_items(base: list[Object], patch: list[Object], key: str) -> list[Object]:
    items = {item[key]: item for item in base}
    front = [merged(items.get(item[key], {}), item) for item in patch if item.get("$patch") != "delete"]
    named = {item[key] for item in patch}
    return [*front, *(item for item in base if item[key] not in named)]


def _resource(path: Path) -> Iterator[Object]:
    yield from assemble(path) if path.is_dir() else yaml.safe_load_all(path.read_text())


def _identity(manifest: Object) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]
