"""What the site allows experiments to name, and whether compiled programs can be kept."""

from __future__ import annotations

from meshkit.compile.store import cache_root, private_folder
from meshkit.config.site import listed, read_site
from meshkit.errors import MeshkitError
from meshkit.verbs.doctor.diagnosis import Result, error, ok, warning


def check_site() -> list[Result]:
    """The declared roots, and the folder of compiled programs."""
    return [*_roots(), *_cache()]


def _roots() -> list[Result]:
    try:
        site = read_site()
    except MeshkitError as e:
        return [error("site", e.message, e.hint or "model_roots and file_roots, each a list of folders")]
    said = [
        f"{what} only from {listed(roots)}"
        for what, roots in (("models", site.model_roots), ("files", site.file_roots))
        if roots is not None
    ]
    return [ok("site", f"experiments may name {', '.join(said)}")] if said else []


def _cache() -> list[Result]:
    try:
        root = cache_root()
    except MeshkitError as e:
        return [error("compile_cache", e.message, e.hint or "MESHKIT_CACHE_BYTES in bytes")]
    if root is None:
        return [warning("compile_cache", "MESHKIT_CACHE=off: every restart compiles again.", "unset MESHKIT_CACHE")]
    problem = private_folder(root / "compiled")
    if problem:
        message = f"compiled programs cannot be kept in {root / 'compiled'}: {problem}; every restart compiles again."
        return [warning("compile_cache", message, "MESHKIT_CACHE with a folder of your own (chmod 700)")]
    return [ok("compile_cache", f"compiled programs are kept in {root / 'compiled'}")]
