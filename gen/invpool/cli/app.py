"""The commands. Exit codes: 0 done, 1 failed, 2 the request itself is wrong."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer
from rich.console import Console
from rich.markup import escape

from invpool._version import __version__
from invpool.errors import OutputError

if TYPE_CHECKING:
    from invpool.generate import On
    from invpool.gpu import Gpu
    from invpool.spec import PoolSpec

# Heavy rooms (torch) are imported inside the commands that need them: --help must be instant.

app = typer.Typer(
    name="invpool",
    help="CUDA kernels for inverted-attention pooling, generated for a fixed H, K, dtype and layout.\n\n"
    "Start with: [bold]invpool generate --H 128 --K 32[/]",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

Variates = Annotated[
    int, typer.Option("--H", help="Number of variates, the axis that attends to itself.", show_default=False)
]
Steps = Annotated[
    int, typer.Option("--K", help="Steps of one trajectory, the axis that scores sum over.", show_default=False)
]
DTypeOption = Annotated[str, typer.Option("--dtype", help="float32, float16, bfloat16 or float64.")]
LayoutOption = Annotated[str, typer.Option("--layout", help="bhk for x[B,H,K], bkh for x[B,K,H] (time-major).")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="exact, or tf32 (float32 only, error up to 1e-3).")]
MaskedOption = Annotated[bool, typer.Option("--masked", help="Take a mask[B,H] of the variates that take part.")]
GpuOption = Annotated[
    Optional[str],
    typer.Option("--gpu", help="Plan for this GPU (default: the one present, else h200).", show_default=False),
]
OnOption = Annotated[
    Optional[str],
    typer.Option(
        "--on",
        help="Prove kernels on: gpu, emulator, both (default: GPU if present, else emulator).",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
PackagePath = Annotated[Path, typer.Argument(help="A generated package, such as build/h128_k32_f32_bhk.")]


def _usage(error: Exception) -> NoReturn:
    raise typer.BadParameter(str(error))


def _spec(H: int, K: int, dtype: str, layout: str, precision: str, masked: bool) -> PoolSpec:
    from invpool.spec import PoolSpec

    try:
        return PoolSpec(H, K, dtype, layout, precision, masked)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        _usage(error)


def _on(on: str | None) -> On | None:
    from invpool.generate import ONS

    for legal in ONS:
        if on == legal:
            return legal
    if on is not None:
        _usage(ValueError(f"--on is {on!r}; legal: {', '.join(ONS)}"))
    return None


def _gpu(name: str | None) -> Gpu | None:
    from invpool.gpu import known_gpu

    try:
        return None if name is None else known_gpu(name)
    except ValueError as error:
        _usage(error)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        _out.print(__version__)
        raise typer.Exit


@app.command()
def generate(
    H: Variates,
    K: Steps,
    dtype: DTypeOption = "float32",
    layout: LayoutOption = "bhk",
    precision: PrecisionOption = "exact",
    masked: MaskedOption = False,
    algorithm: Annotated[
        Optional[str],
        typer.Option("--algorithm", help="Use this one (default: least predicted time).", show_default=False),
    ] = None,
    arch: Annotated[
        Optional[list[str]],
        typer.Option(
            "--arch",
            help="Compile for sm_90, ...; repeat for more (default: the GPU's, else five).",
            show_default=False,
        ),
    ] = None,
    gpu: GpuOption = None,
    out: Annotated[
        Optional[Path], typer.Option("--out", help="Where to put it (default: build/<slug>).", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a package that was edited by hand.")] = False,
    on: OnOption = None,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="Take the plans of least predicted time, even where some were tuned.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a package: plan, render, compile, prove, bind.

    Example: invpool generate --H 128 --K 32 --dtype bfloat16 --layout bkh
    """
    spec, wanted = _spec(H, K, dtype, layout, precision, masked), _gpu(gpu)
    from invpool.algorithms import find_algorithm
    from invpool.gpu import check_arch

    try:
        archs = tuple(check_arch(name) for name in arch or ())
        if algorithm is not None:
            find_algorithm(algorithm)
    except ValueError as error:
        _usage(error)

    from invpool.cli import tables
    from invpool.generate import Request
    from invpool.generate import generate as run

    request = Request(
        spec, out or Path("build") / spec.slug, wanted, archs, algorithm, force, _on(on), tuned=not predicted
    )
    with _err.status(f"generating {spec.slug}") as status:
        result = run(request, progress=lambda what: status.update(f"{spec.slug}: {what}"))
    if json:
        tables.print_json(_out, tables.generated_dict(result))
    else:
        tables.print_generated(_out, result)


@app.command()
def check(path: PackagePath, on: OnOption = None, json: JsonOption = False) -> None:
    """Prove a package again: its kernels on the GPU or the emulator, its closed form on the CPU, against float64.

    Example: invpool check build/h128_k32_f32_bhk
    """
    from invpool.binding import remove_proof, require_manifest, write_proof
    from invpool.cli import tables
    from invpool.generate import package_obstacle, proof_record, prove_on_emulator, prove_package, proving_places

    wanted = _on(on)
    with _err.status(f"checking {path}"):
        manifest = require_manifest(path)
        on_gpu, on_emulator = proving_places(wanted, package_obstacle(path, manifest))
        remove_proof(path)
        kernels, closed_form = prove_package(path, on_gpu)
        emulated = prove_on_emulator(path, required=wanted is not None) if on_emulator else None
    record = proof_record(kernels, closed_form, emulated)
    try:
        write_proof(path, record)
    except OutputError as error:
        _err.print(f"warning: {escape(str(error))}")
    if json:
        tables.print_json(_out, record)
    else:
        for proof in tables.kernel_proofs(kernels, emulated):
            tables.print_proof(_out, "kernels", proof)
        tables.print_proof(_out, "closed form for CPU tensors", closed_form)
    if not all(proof.ok for proof in (kernels, emulated, closed_form) if proof is not None):
        raise typer.Exit(1)


@app.command()
def show(
    path: PackagePath,
    source: Annotated[
        Optional[str], typer.Option("--source", help="Print the CUDA source: forward or backward.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print what a package holds: plans, resources, last proof, or its CUDA source.

    Example: invpool show build/h128_k32_f32_bhk --source forward
    """
    from invpool.binding import read_proof, require_manifest
    from invpool.cli import tables

    manifest = require_manifest(path)
    if source is not None:
        directions = dict.fromkeys(kernel["direction"] for kernel in manifest["kernels"])
        if source not in directions:
            _usage(ValueError(f"--source is {source!r}; legal: {', '.join(directions)}"))
        for kernel in manifest["kernels"]:
            if kernel["direction"] != source:
                continue
            file = path / kernel["source"]["file"]
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise OutputError(
                    f"{file} cannot be read: {error}; regenerate with: {manifest['regenerate']} --out {path} --force"
                ) from error
            _out.out(text, highlight=False)
        return
    proof = read_proof(path)
    if json:
        tables.print_json(_out, {"manifest": manifest, "proof": proof})
    else:
        tables.print_manifest(_out, path, manifest, proof)


@app.command()
def explain(
    H: Variates,
    K: Steps,
    dtype: DTypeOption = "float32",
    layout: LayoutOption = "bhk",
    precision: PrecisionOption = "exact",
    masked: MaskedOption = False,
    gpu: GpuOption = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Items of one launch.")] = 16384,
    json: JsonOption = False,
) -> None:
    """Count what each algorithm would do for a spec on a GPU, and predict what bounds it.

    Example: invpool explain --H 128 --K 32 --gpu a100
    """
    spec, wanted = _spec(H, K, dtype, layout, precision, masked), _gpu(gpu)
    from invpool.cli import tables
    from invpool.generate import planning_gpu

    judged = planning_gpu(wanted)[0]
    rows = tables.explain_rows(spec, judged, batch)
    if json:
        tables.print_json(_out, {"slug": spec.slug, "gpu": judged.name, "batch": batch, "rows": rows})
    else:
        tables.print_explain(_out, spec, judged, batch, rows)


@app.command()
def warmup(
    H: Variates,
    K: Steps,
    dtype: DTypeOption = "float32",
    layout: LayoutOption = "bhk",
    precision: PrecisionOption = "exact",
    masked: MaskedOption = False,
    device: Annotated[int, typer.Option("--device", min=0, help="Number of the GPU.")] = 0,
) -> None:
    """Make the kernels that invpool.inverted_attention_pool would make at its first call for a shape.

    Example: invpool warmup --H 128 --K 32 --dtype bfloat16
    """
    spec = _spec(H, K, dtype, layout, precision, masked)
    from invpool import frontdoor

    with _err.status(f"making kernels for {spec.slug}"):
        folder = frontdoor.warmup(H, K, spec.dtype, layout, precision, masked, device)
    if folder is None:
        raise OutputError(f"no kernels were made for {spec.slug}: there is no GPU here that could run them")
    _out.print(escape(str(folder)), soft_wrap=True)


@app.command()
def sweep(
    path: Annotated[
        Optional[Path],
        typer.Argument(help="A generated package, which is made again with what was found.", show_default=False),
    ] = None,
    H: Annotated[Optional[int], typer.Option("--H", help="Number of variates.", show_default=False)] = None,
    K: Annotated[Optional[int], typer.Option("--K", help="Steps of one trajectory.", show_default=False)] = None,
    dtype: DTypeOption = "float32",
    layout: LayoutOption = "bhk",
    precision: PrecisionOption = "exact",
    masked: MaskedOption = False,
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes to tune for.")] = "16,256,4096,65536",
    budget: Annotated[
        str, typer.Option("--budget", help="Candidates (200) or time (90s, 5m, 1h) to search, or all.")
    ] = "200",
    direction: Annotated[
        Optional[str], typer.Option("--direction", help="forward or backward alone.", show_default=False)
    ] = None,
    algorithm: Annotated[
        Optional[list[str]],
        typer.Option("--algorithm", help="Try this one; repeat for more (default: all).", show_default=False),
    ] = None,
    measure: Annotated[
        str, typer.Option("--measure", help="gpu, or counters: on the emulator, to try things out.")
    ] = "gpu",
    gpu: GpuOption = None,
    ray: Annotated[
        Optional[str],
        typer.Option("--ray", help="Measure on a Ray cluster: its address, auto or local.", show_default=False),
    ] = None,
    replay: Annotated[
        Optional[Path], typer.Option("--replay", help="Search in these records, without a GPU.", show_default=False)
    ] = None,
    records: Annotated[
        Optional[Path],
        typer.Option("--records", help="Keep records here (default: beside the table).", show_default=False),
    ] = None,
    plans: Annotated[
        Optional[Path], typer.Option("--plans", help="JSON file of plans to try besides.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that one candidate may take.")] = 120.0,
    plot: Annotated[
        Optional[Path], typer.Option("--plot", help="Draw measured against predicted time.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest right plans on the GPU that is there, by batch size; generate takes them from then on.

    Every candidate is checked against float64, forward and backward, before it is timed.

    A sweep that was stopped goes on where it was.

    Example: invpool sweep --H 128 --K 32 --batch 16,4096 --plot sweep.png
    """
    from invpool.cli import sweeping

    archs: tuple[str, ...] = ()
    if path is not None:
        from invpool.binding import check_output, recorded_archs, require_manifest
        from invpool.spec import PoolSpec

        if H is not None or K is not None:
            _usage(ValueError("give a package or --H and --K, not both"))
        manifest = require_manifest(path)
        check_output(path)  # before the work, not after it
        spec, archs = PoolSpec(**manifest["spec"]), recorded_archs(manifest)
    elif H is None or K is None:
        _usage(ValueError("give a generated package, or --H and --K"))
    else:
        spec = _spec(H, K, dtype, layout, precision, masked)
    try:
        asked = sweeping.Asked.parse(
            spec, batch, budget, direction, algorithm or [], measure, _gpu(gpu), ray, replay, records, plans, timeout
        )
    except ValueError as error:
        _usage(error)
    result = sweeping.run(asked, _err, _out, json, plot)
    if path is not None and sweeping.may_regenerate(result):
        from invpool.generate import Request
        from invpool.generate import generate as make

        with _err.status(f"generating {spec.slug} with the tuned plans"):
            make(Request(spec, path, archs=archs))
        _err.print(f"{escape(str(path))} has the tuned plans now", soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)


@app.command()
def clean(
    path: Annotated[Path, typer.Argument(help="A package, or a folder of packages.")] = Path("build"),
    cache: Annotated[bool, typer.Option("--cache", help="Remove the cache of compiled kernels too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove generated packages, and nothing else, from build/. One that was edited by hand is kept.

    Example: invpool clean --cache
    """
    from invpool.binding import edited_files, read_manifest, require_manifest
    from invpool.cache import default_root

    packages = [path] if read_manifest(path) else sorted(folder for folder in path.glob("*/") if read_manifest(folder))
    folders = []
    for package in packages:
        try:
            edited = edited_files(package, require_manifest(package))
            reason = f"edited by hand ({', '.join(edited)})" if edited else None
        except OutputError as error:
            reason = str(error)
        if reason is None:
            folders.append(package)
        else:
            _out.print(f"kept {escape(str(package))}: {escape(reason)}", soft_wrap=True)
    if cache:
        folders += [default_root() / name for name in ("kernels", "emulated") if (default_root() / name).is_dir()]
    for folder in folders:
        if not dry_run:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise OutputError(f"{folder} cannot be removed: {error}") from error
        _out.print(f"{'would remove' if dry_run else 'removed'} {escape(str(folder))}", soft_wrap=True)
    if not folders:
        _out.print(f"nothing to remove in {escape(str(path))}", soft_wrap=True)


def main() -> None:
    """Entry point of the ``invpool`` script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except (RuntimeError, OSError) as error:
        # Messages hold brackets (an extra, a path) that are no markup.
        _err.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
