"""Schemathesis: whatever the OpenAPI document allows or forbids, the server answers as it says there, and never with a 5xx."""

import pathlib
import subprocess
import sys


def test_the_server_answers_as_its_document_says(base, tmp_path):
    command = [
        pathlib.Path(sys.executable).with_name("st"),
        "run",
        f"{base}/openapi.json",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=20",
        "--seed=1",
        "--generation-database=none",
        "--suppress-health-check=all",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
