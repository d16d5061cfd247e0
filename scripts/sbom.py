#!/usr/bin/env python3
"""Writes a software bill of materials (CycloneDX 1.5, JSON) of the binary `tenure` to standard output.

It lists every crate that is compiled into the release binary, with version, licence, package URL and the checksum of its
archive: from `cargo metadata` and Cargo.lock, nothing else.
"""

import json
import pathlib
import subprocess
import tomllib
import uuid

ROOT = pathlib.Path(__file__).parents[1]


def metadata() -> dict:
    host = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    target = next(line.split()[1] for line in host.splitlines() if line.startswith("host:"))
    command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={target}"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def linked(resolve: dict, root: str) -> set[str]:
    """The packages that a package is built from, those for tests and benchmarks apart."""
    nodes = {node["id"]: node for node in resolve["nodes"]}
    found, todo = set(), [root]
    while todo:
        package = todo.pop()
        if package in found:
            continue
        found.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] in (None, "build") for kind in dependency["dep_kinds"]):
                todo.append(dependency["pkg"])
    return found


def component(package: dict, checksums: dict) -> dict:
    name, version = package["name"], package["version"]
    entry = {
        "type": "library",
        "bom-ref": f"pkg:cargo/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:cargo/{name}@{version}",
    }
    if package.get("license"):
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum := checksums.get((name, version)):
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def main():
    data = metadata()
    packages = {package["id"]: package for package in data["packages"]}
    binary = next(p for p in packages.values() if p["name"] == "tenure-server")
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    checksums = {(p["name"], p["version"]): p["checksum"] for p in lock if "checksum" in p}
    used = sorted(linked(data["resolve"], binary["id"]) - {binary["id"]})
    components = [component(packages[package], checksums) for package in used]
    components.sort(key=lambda entry: entry["purl"])
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([binary["version"], components]))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "tenure", "version": binary["version"]}},
        "components": components,
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
