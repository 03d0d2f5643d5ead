"""Provide traces of an H100 as run folders; tests/data/SOURCES.md describes them."""

import gzip
import shutil
from pathlib import Path

TRACES = Path(__file__).parent.parent / "data/traces"


def run_folder(tmp_path, name):
    """Return the run folder of a capture that is kept in tests/data."""
    kept, trace = TRACES / name, tmp_path / name / "trace"
    session = trace / "plugins/profile/p0"
    session.mkdir(parents=True)
    for file in ("capture-p0.json", "program-p0.hlo.pb.gz"):
        shutil.copy(kept / file, trace / file)
    (session / "vm.xplane.pb").write_bytes(gzip.decompress((kept / "vm.xplane.pb.gz").read_bytes()))
    return tmp_path / name
