"""The generated package: what lies in ``build/<slug>/`` and how it gets there whole or not at all.

__init__.py  runtime.py  manifest.json  <kernel>.cu  <kernel>.<target>.cubin  <kernel>.<target>.ptx  proof.json
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from invpool._version import __version__
from invpool.abi import Direction, argument_names
from invpool.algorithms import Algorithm, Plan, find_algorithm
from invpool.cache import write_durably
from invpool.compile import Compiled, Resources, Target
from invpool.errors import OutputError
from invpool.render import entry_name, render_template
from invpool.runtime import MANIFEST_SCHEMA
from invpool.spec import PoolSpec

_MANIFEST: Final = "manifest.json"
_PROOF: Final = "proof.json"
_import_lock: Final = threading.Lock()


@dataclasses.dataclass(frozen=True)
class BuiltKernel:
    """One (direction, plan) with its source and its code for each target."""

    algorithm: Algorithm[Any]
    plan: Plan
    source: str
    images: tuple[tuple[Target, Compiled], ...]


def _file_stems(kernels: Sequence[BuiltKernel]) -> list[str]:
    """What each kernel's files are called: algorithm and direction, and a number from the second such kernel on."""
    stems: list[str] = []
    seen: collections.Counter[str] = collections.Counter()
    for kernel in kernels:
        stem = f"{kernel.algorithm.name}_{kernel.plan.direction}"
        seen[stem] += 1
        stems.append(stem if seen[stem] == 1 else f"{stem}_{seen[stem]}")
    return stems


@dataclasses.dataclass(frozen=True)
class TableRow:
    """From ``min_batch`` items on, the kernels of these positions serve forward and backward."""

    min_batch: int
    forward: int
    backward: int


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest_kernel(spec: PoolSpec, kernel: BuiltKernel, stem: str) -> dict[str, Any]:
    direction: Direction = kernel.plan.direction
    algorithm = kernel.algorithm
    return {
        "direction": direction,
        "algorithm": algorithm.name,
        "plan": kernel.plan.knobs,
        "entry": entry_name(algorithm, spec, direction),
        "arguments": list(argument_names(direction, algorithm.state(spec))),
        "launch": dataclasses.asdict(algorithm.launch(spec, kernel.plan)),
        "source": {"file": f"{stem}.cu", "sha256": _sha256(kernel.source.encode())},
        "images": [
            {
                "target": target.name,
                "file": f"{stem}.{target.name}.{target.kind}",
                "sha256": _sha256(compiled.code),
                "resources": dataclasses.asdict(compiled.resources) if compiled.resources else None,
            }
            for target, compiled in kernel.images
        ],
    }


def regenerate_command(spec: PoolSpec, algorithm: str | None) -> str:
    """What to type to make a package again; tuned plans are found again, those of one algorithm are asked for."""
    return f"invpool generate {spec.cli_arguments()}" + (f" --algorithm {algorithm}" if algorithm else "")


def package_files(
    spec: PoolSpec,
    gpu_name: str,
    kernels: Sequence[BuiltKernel],
    table: Sequence[TableRow],
    tuned_on: str | None = None,
) -> dict[str, bytes]:
    """Every file of the package by name, the same bytes on every machine.

    ``tuned_on`` is the device whose tuned table gave the plans; None where they are predicted.

    Raises:
        ValueError: the kernels do not agree on what forward leaves for backward.
    """
    states = {kernel.algorithm.state(spec) for kernel in kernels}
    if len(states) != 1:
        raise ValueError(f"kernels of one package must agree on what forward leaves for backward: {sorted(states)}")
    regenerate = regenerate_command(spec, None if tuned_on else kernels[0].algorithm.name)
    stems = _file_stems(kernels)
    runtime = (importlib.resources.files("invpool") / "runtime.py").read_bytes()
    context = {
        "version": __version__,
        "regenerate": regenerate,
        "slug": spec.slug,
        "problem": f"x[B,{spec.layout[1].upper()},{spec.layout[2].upper()}] with H={spec.H}, K={spec.K}, {spec.dtype}",
        "axes": f"{spec.H},{spec.K}" if spec.layout == "bhk" else f"{spec.K},{spec.H}",
        "H": spec.H,
        "dtype": spec.dtype,
        "masked": spec.masked,
    }
    binding = render_template("binding/__init__.py.j2", context).encode()
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "generator": __version__,
        "slug": spec.slug,
        "spec": dataclasses.asdict(spec),
        "planned_for": gpu_name,
        "tuned_on": tuned_on,
        "regenerate": regenerate,
        "state": list(states.pop()),
        "kernels": [_manifest_kernel(spec, kernel, stem) for kernel, stem in zip(kernels, stems, strict=True)],
        "table": [dataclasses.asdict(row) for row in table],
        "binding": {"file": "__init__.py", "sha256": _sha256(binding)},
        "runtime": {"file": "runtime.py", "sha256": _sha256(runtime)},
    }
    files = {"__init__.py": binding, "runtime.py": runtime}
    for kernel, stem in zip(kernels, stems, strict=True):
        files[f"{stem}.cu"] = kernel.source.encode()
        for target, compiled in kernel.images:
            files[f"{stem}.{target.name}.{target.kind}"] = compiled.code
    files[_MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    return files


def holds(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether the folder already holds exactly these files (and perhaps a proof)."""
    try:
        return all((folder / name).read_bytes() == data for name, data in files.items())
    except OSError:
        return False


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a generated package, of any schema, or None if the folder does not hold one of ours.

    Raises:
        OutputError: the folder cannot be read.
    """
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {error.strerror}; make it readable or choose another folder"
        ) from error
    ours = {"schema": int, "generator": str, "slug": str, "kernels": list}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(name), ours[name]) for name in ours):
        return None
    return manifest


def require_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a generated package of this schema, with every field that is read here or printed.

    Raises:
        OutputError: there is none, or it is damaged or of another schema; says what to type.
    """
    path, manifest = folder / _MANIFEST, read_manifest(folder)
    if manifest is None:
        raise OutputError(f"{folder} holds no generated package; make one with: invpool generate --out {folder}")
    regenerate = replace_command(folder, manifest)
    if manifest["schema"] != MANIFEST_SCHEMA:
        raise OutputError(
            f"{path} has schema {manifest['schema']}, this invpool reads {MANIFEST_SCHEMA}; "
            f"regenerate with: {regenerate}"
        )
    try:
        PoolSpec(**manifest["spec"])
        _recorded_hashes(manifest)
        texts = [manifest["planned_for"], manifest["regenerate"]]
        for kernel in manifest["kernels"]:
            launch = kernel["launch"]
            texts += [kernel["direction"], kernel["algorithm"], *kernel["plan"].keys()]
            texts += [image["target"] for image in kernel["images"]]
            numbers = [launch["threads"], launch["shared_bytes"]]
            numbers += [] if launch["most_blocks"] is None else [launch["most_blocks"]]
            for image in kernel["images"]:
                numbers += dataclasses.astuple(Resources(**image["resources"])) if image["resources"] else ()
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError(f"{numbers} are not all integers")
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{texts} are not all strings")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OutputError(f"{path} is damaged ({error!r}); regenerate with: {regenerate}") from error
    return manifest


def replace_command(folder: Path, manifest: dict[str, Any], any_algorithm: bool = False) -> str:
    """What to type to make a package again, for the GPU that is there, in its place."""
    regenerate = str(manifest.get("regenerate", "invpool generate --H ... --K ..."))
    if any_algorithm:
        regenerate = re.sub(r" --algorithm \S+", "", regenerate)
    return f"{regenerate} --out {folder} --force"


def _recorded_hashes(manifest: dict[str, Any]) -> dict[str, str]:
    """The sha256 of every file that a manifest names, by the file's name."""
    entries = [manifest["binding"], manifest["runtime"]]
    for kernel in manifest["kernels"]:
        entries += [kernel["source"], *kernel["images"]]
    return {str(entry["file"]): str(entry["sha256"]) for entry in entries}


def recorded_plans(manifest: dict[str, Any]) -> list[tuple[Algorithm[Any], Plan]]:
    """The algorithm and the plan of each kernel of a package.

    Raises:
        ValueError: this invpool has no such algorithm or plan parameter: another version made the package.
    """
    plans: list[tuple[Algorithm[Any], Plan]] = []
    for kernel in manifest["kernels"]:
        algorithm = find_algorithm(kernel["algorithm"])
        plans.append((algorithm, algorithm.plan_from_knobs(kernel["direction"], kernel["plan"])))
    return plans


def recorded_archs(manifest: dict[str, Any]) -> tuple[str, ...]:
    """The architectures that a package has machine code for, ``sm_90`` and the like."""
    targets = (image["target"] for kernel in manifest["kernels"] for image in kernel["images"])
    return tuple(dict.fromkeys(t.rstrip("a") for t in targets if t.startswith("sm_")))


def edited_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What lies in a package and is not as its manifest has it: somebody's work that must not be lost."""
    recorded = _recorded_hashes(manifest)
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in (_MANIFEST, _PROOF, "__pycache__")
        and not (path.is_file() and _sha256(path.read_bytes()) == recorded.get(path.name))
    )


def check_output(folder: Path, force: bool = False) -> None:
    """Refuses a path that cannot be written or that holds something else, before any work is done.

    Raises:
        OutputError: says what is there and what to type.
    """
    if folder.name in ("", ".."):
        raise OutputError(f"{str(folder)!r} does not name a folder of its own; type one, such as --out build/pool")
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise OutputError(f"{folder} is not a folder; choose another with --out")
        if folder.is_dir() and any(folder.iterdir()):
            if read_manifest(folder) is None:
                raise OutputError(
                    f"{folder} holds something that invpool did not make; choose another folder with --out"
                )
            edited = [] if force else edited_files(folder, require_manifest(folder))
            if edited:
                raise OutputError(f"{folder} was edited by hand ({', '.join(edited)}); --force replaces it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}; choose another with --out") from error


def _staging_prefix(folder: Path) -> str:
    """How the temporary folders beside a package are named: by a hash, so that none is the start of another's."""
    return f".invpool-{_sha256(folder.name.encode())[:16]}-"


@contextlib.contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Keeps everybody else from making packages in the parent folder, which is what is locked: nothing is left there.

    Raises:
        OutputError: the parent folder cannot be locked.
    """
    parent = folder.resolve().parent
    try:
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputError(f"{parent} cannot be opened: {error.strerror}; choose another with --out") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise OutputError(f"{parent} cannot be locked: {error.strerror}; choose another with --out") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_package(folder: Path, files: dict[str, bytes]) -> Iterator[Path]:
    """Writes a package beside its place, yields it for proof, and moves it into place if the body succeeds.

    The caller holds the output's lock, so whatever an earlier call left behind belongs to nobody alive.
    The move is two renames; if the second fails, the first is undone.

    Raises:
        OutputError: the disk is full or the path cannot be written.
    """
    folder = folder.resolve()
    prefix = _staging_prefix(folder)
    workspace: Path | None = None
    try:
        for stale in folder.parent.iterdir():
            if stale.name.startswith(prefix):
                shutil.rmtree(stale, ignore_errors=True)
        workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        staging = workspace / "new"
        staging.mkdir()
        for name, data in files.items():
            write_durably(staging / name, data)
        yield staging
        if folder.exists():
            folder.rename(workspace / "old")
        staging.rename(folder)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    finally:
        if workspace is not None:
            if (workspace / "old").exists() and not folder.exists():
                (workspace / "old").rename(folder)
            shutil.rmtree(workspace, ignore_errors=True)


def write_proof(folder: Path, proof: dict[str, Any]) -> None:
    """Records the last proof beside the package; it is no part of the manifest's hash."""
    try:
        write_durably(folder / _PROOF, (json.dumps(proof, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise OutputError(f"{folder / _PROOF} cannot be written: {error}") from error


def remove_proof(folder: Path) -> None:
    """Called before a package is proved again: a proof that breaks off must not leave an older one that says ok."""
    with contextlib.suppress(OSError):
        (folder / _PROOF).unlink()


def read_proof(folder: Path) -> dict[str, Any] | None:
    """The last proof, or None where there is none that can be read."""
    try:
        proof = json.loads((folder / _PROOF).read_bytes())
        for part in ("kernels", "emulated", "closed_form"):
            if proof[part] is not None:
                proof[part]["device"], proof[part]["ok"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return proof if isinstance(proof, dict) else None


def import_package(folder: Path) -> ModuleType:
    """Imports a generated package from any folder under a name of its own, once a manifest, from any thread.

    Raises:
        OutputError: the folder holds no whole generated package.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise OutputError(f"{folder} holds no generated package; make one with: invpool generate --out {folder}")
    missing = [name for name in ("__init__.py", "runtime.py") if not (folder / name).is_file()]
    if missing:
        raise OutputError(f"{folder} lacks {', '.join(missing)}; regenerate with: {replace_command(folder, manifest)}")
    digest = _sha256(str(folder.resolve()).encode() + (folder / _MANIFEST).read_bytes())[:16]
    name = f"invpool_generated_{digest}"
    # A module is in sys.modules before it is whole: whoever looks it up waits until it is.
    with _import_lock:
        if name in sys.modules:
            return sys.modules[name]
        location = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if location is None or location.loader is None:
            raise OutputError(f"{folder / '__init__.py'} cannot be imported")
        module = importlib.util.module_from_spec(location)
        sys.modules[name] = module
        try:
            location.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
