from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import invpool
from helpers import Persistent, run_python
from invpool.abi import DIRECTIONS
from invpool.algorithms import best_plan
from invpool.binding import (
    BuiltKernel,
    TableRow,
    check_output,
    import_package,
    package_files,
    read_manifest,
    require_manifest,
    staged_package,
)
from invpool.errors import OutputError
from invpool.gpu import known_gpu
from invpool.render import render_kernel
from invpool.runtime import LoadError, choose_image
from invpool.spec import PoolSpec

SPEC = PoolSpec(5, 3)
MakePackage = Callable[..., Path]


def with_launch(manifest: dict, **changes: object) -> dict:
    kernels = [kernel | {"launch": kernel["launch"] | changes} for kernel in manifest["kernels"]]
    return manifest | {"kernels": kernels}


def test_files_and_manifest(make_package: MakePackage) -> None:
    folder = make_package(SPEC)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "__init__.py",
        "manifest.json",
        "runtime.py",
        "three_pass_backward.compute_75.ptx",
        "three_pass_backward.cu",
        "three_pass_backward.sm_90.cubin",
        "three_pass_forward.compute_75.ptx",
        "three_pass_forward.cu",
        "three_pass_forward.sm_90.cubin",
    ]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["spec"] == {
        "H": 5,
        "K": 3,
        "dtype": "float32",
        "layout": "bhk",
        "precision": "exact",
        "masked": False,
    }
    assert manifest["table"] == [{"min_batch": 0, "forward": 0, "backward": 1}]
    assert manifest["state"] == ["lse", "attn"]
    source = Path(invpool.__file__).parent / "runtime.py"
    assert (folder / "runtime.py").read_bytes() == source.read_bytes()
    for name in ("__init__.py", "runtime.py", "three_pass_forward.cu"):
        assert "SPDX-License-Identifier: Apache-2.0" in (folder / name).read_text()[:400]


def test_a_cap_on_the_grid_is_recorded_and_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, gpu = Persistent(), known_gpu("h200")
    plans = [best_plan(algorithm, SPEC, gpu, direction) for direction in DIRECTIONS]
    kernels = [BuiltKernel(algorithm, best[0], render_kernel(algorithm, SPEC, best[0]), ()) for best in plans if best]
    with staged_package(tmp_path / "p", package_files(SPEC, gpu.name, kernels, (TableRow(0, 0, 1),))):
        pass
    manifest = require_manifest(tmp_path / "p")
    caps = [kernel["launch"]["most_blocks"] for kernel in manifest["kernels"]]
    assert caps == [kernel["plan"]["most_blocks"] for kernel in manifest["kernels"]]
    assert all(f"grid min(B, {cap})," in kernel.source for cap, kernel in zip(caps, kernels, strict=True))

    op, launched = invpool.load(tmp_path / "p"), []
    monkeypatch.setattr(op, "_run_kernel", lambda index, blocks, arguments, device: launched.append((index, blocks)))
    for batch in (0, 1, caps[0], caps[0] + 1, 3 * max(caps)):
        x = torch.empty(batch, 5, 3)
        op.cuda_backward(
            x[:, :, 0], x, torch.ones(()), None, *op.backward_state(op.cuda_forward(x, torch.ones(()), None))
        )
        expected = [(index, min(batch, cap)) for index, cap in enumerate(caps)] if batch else []
        assert launched == expected
        launched.clear()


def test_packages_are_the_same_bytes_every_time(make_package: MakePackage, tmp_path: Path) -> None:
    first, second = make_package(SPEC, tmp_path / "a"), make_package(SPEC, tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'invpool', 'jinja2', 'pycuda', 'typer', 'rich', 'numpy', 'click'}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
"""


def test_import_with_the_generator_and_all_it_needs_blocked(make_package: MakePackage) -> None:
    """torch itself asks for jinja2 and numpy only when compiling or converting."""
    folder = make_package(SPEC)
    code = BLOCKER + (
        "import logging, torch\n"
        f"from {SPEC.slug} import InvertedAttentionPool, attention_map, inverted_attention_pool\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = torch.tensor([[[0., 1.], [1., 0.]]]).repeat(1, 1, 2)[:, :, :3].repeat(1, 3, 1)[:, :5].contiguous()\n"
        "x.requires_grad_()\n"
        "out = inverted_attention_pool(x); out.sum().backward()\n"
        "assert torch.allclose(InvertedAttentionPool()(x), out)\n"
        "assert torch.allclose(attention_map(x).sum(-1), torch.ones(1, 5))\n"
        "print(tuple(out.shape), tuple(x.grad.shape))\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    assert run_python(code, cwd=folder.parent, env=env).strip() == "(1, 5) (1, 5, 3)"


def test_load_gives_the_op(make_package: MakePackage) -> None:
    op = invpool.load(make_package(SPEC))
    x = torch.full((2, 5, 3), 0.25)
    torch.testing.assert_close(op(x), torch.full((2, 5), 0.25))
    assert repr(op).startswith("GeneratedOp(h5_k3_f32_bhk, invpool_")


def test_one_spec_twice_other_specs_and_another_version_in_one_process(
    make_package: MakePackage, tmp_path: Path
) -> None:
    first = invpool.load(make_package(SPEC))
    again = invpool.load(make_package(SPEC, tmp_path / "copy"))
    assert again.namespace == first.namespace
    other_spec = invpool.load(make_package(PoolSpec(4, 3)))
    folder = make_package(SPEC, tmp_path / "newer")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"generator": "9.9.9"}))
    other_version = invpool.load(folder)
    assert len({first.namespace, other_spec.namespace, other_version.namespace}) == 3
    x = torch.randn(2, 5, 3)
    for op in (first, again, other_version):
        torch.testing.assert_close(op(x), first(x))
    assert other_spec(torch.randn(2, 4, 3)).shape == (2, 4)


def test_a_copy_serves_when_the_first_is_gone(make_package: MakePackage, tmp_path: Path) -> None:
    """The raw ops are registered once a manifest; what they run must not hang on the folder that came first."""
    spec = PoolSpec(7, 3)
    first = invpool.load(make_package(spec, tmp_path / "first"))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    second = invpool.load(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert second.namespace == first.namespace
    assert second.folder == tmp_path / "second"
    second.batch_invariant = True
    assert first.batch_invariant
    read: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        runtime = sys.modules[type(first).__module__]
        patch.setattr(runtime, "_Bound", lambda device: contextlib.nullcontext())
        patch.setattr(runtime, "_call", lambda name, *rest: read.append(name) if name == "cuModuleLoadData" else None)
        with pytest.raises(AssertionError):  # no function came of it, but the code was read
            first._load(0, first._kernels[0])
    assert read == ["cuModuleLoadData"]


def test_registration_outlives_the_module(make_package: MakePackage, tmp_path: Path) -> None:
    folder = make_package(PoolSpec(6, 3), tmp_path / "short_lived")
    module = import_package(folder)
    namespace = module.op.namespace
    sys.modules.pop(module.__name__)
    sys.modules.pop(f"{module.__name__}.runtime")
    del module
    import gc

    gc.collect()
    out = getattr(torch.ops, namespace).forward(torch.ones(1, 6, 3), None, None)[0]
    torch.testing.assert_close(out, torch.ones(1, 6))
    assert import_package(folder).op(torch.ones(1, 6, 3)).shape == (1, 6)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda m: m | {"schema": 0},
            "has schema 0, this runtime reads 3; regenerate with: invpool generate --H 5 --K 3",
        ),
        (lambda m: {k: v for k, v in m.items() if k != "table"}, "is damaged .*regenerate with"),
        (lambda m: m | {"spec": {**m["spec"], "dtype": "float8"}}, "is damaged .*float8"),
        (lambda m: m | {"kernels": [{}]}, "is damaged"),
        (lambda m: with_launch(m, most_blocks="many"), "is damaged .*many"),
    ],
)
def test_a_damaged_manifest_says_what_to_type(
    make_package: MakePackage, tmp_path: Path, damage: Callable[[dict], dict], message: str
) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    path = folder / "manifest.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(Exception, match=message) as caught:
        invpool.load(folder)
    assert type(caught.value).__name__ == LoadError.__name__
    assert isinstance(caught.value, RuntimeError)


def test_threads_import_a_package_once_and_whole(make_package: MakePackage, tmp_path: Path) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    init = folder / "__init__.py"
    init.write_text(init.read_text().replace("from pathlib", "import time\n\ntime.sleep(0.3)\nfrom pathlib"))
    with ThreadPoolExecutor(4) as pool:
        ops = list(pool.map(lambda _: import_package(folder).op, range(4)))
    assert len(set(map(id, ops))) == 1


@pytest.mark.parametrize("name", ["__init__.py", "runtime.py"])
def test_a_package_that_lacks_a_module_says_what_to_type(make_package: MakePackage, tmp_path: Path, name: str) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    (folder / name).unlink()
    with pytest.raises(OutputError, match=rf"lacks {name}; regenerate with: invpool generate --H 5 --K 3 .*--force"):
        import_package(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            {"schema": 0, "planned_for": None},
            r"has schema 0, this invpool reads \d+; regenerate with: invpool generate",
        ),
        ({"kernels": [{}]}, "is damaged .*regenerate with: invpool generate --H 5 --K 3 .*--force"),
        ({"kernels": [3]}, "is damaged"),
        ({"runtime": None}, "is damaged"),
        ({"binding": {}}, "is damaged"),
        ({"planned_for": 7}, "is damaged"),
        ({"spec": {"H": 5}}, "is damaged"),
        (lambda m: with_launch(m, most_blocks="many"), "is damaged .*many.* are not all integers"),
        (lambda m: with_launch(m, most_blocks=None), None),
        (lambda m: with_launch(m, most_blocks=7), None),
    ],
)
def test_generating_onto_or_showing_a_damaged_package_says_what_to_type(
    make_package: MakePackage, tmp_path: Path, damage: dict | Callable[[dict], dict], message: str | None
) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(damage(manifest) if callable(damage) else manifest | damage))
    for action in (check_output, require_manifest):
        with pytest.raises(OutputError, match=message) if message else contextlib.nullcontext():
            action(folder)
    check_output(folder, force=True)


def test_a_folder_that_cannot_be_read_is_one_line(
    make_package: MakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_package(SPEC, tmp_path / "p")

    def unreadable(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    for action in (check_output, require_manifest, import_package):
        with pytest.raises(OutputError, match=r"manifest.json cannot be read: Permission denied"):
            action(folder)


def test_output_refuses_what_is_not_ours(make_package: MakePackage, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="did not make"):
        check_output(tmp_path / "notes", force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is not a folder"):
        check_output(tmp_path / "file")
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    check_output(tmp_path / "new" / "deeper")
    folder = make_package(SPEC, tmp_path / "ours")
    check_output(folder)
    (folder / "three_pass_forward.cu").write_text("// edited")
    with pytest.raises(OutputError, match=r"edited by hand \(three_pass_forward.cu\); --force replaces it"):
        check_output(folder)
    check_output(folder, force=True)


@pytest.mark.parametrize(
    "name",
    ["__init__.py", "runtime.py", "three_pass_forward.sm_90.cubin", "three_pass_backward.cu", "notes.txt", "sub"],
)
def test_what_is_not_as_the_manifest_has_it_is_kept(make_package: MakePackage, tmp_path: Path, name: str) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    (folder / "proof.json").write_text("{}")
    (folder / "__pycache__").mkdir()
    check_output(folder)
    if name == "sub":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    with pytest.raises(OutputError, match=rf"edited by hand \({name}\); --force replaces it"):
        check_output(folder)
    check_output(folder, force=True)


@pytest.mark.parametrize("lacking", ["schema", "generator", "slug", "kernels"])
def test_a_manifest_of_somebody_else_is_not_ours(make_package: MakePackage, tmp_path: Path, lacking: str) -> None:
    folder = make_package(SPEC, tmp_path / "p")
    manifest = json.loads((folder / "manifest.json").read_text())
    for other in ({key: value for key, value in manifest.items() if key != lacking}, manifest | {lacking: {}}):
        (folder / "manifest.json").write_text(json.dumps(other))
        assert read_manifest(folder) is None
        with pytest.raises(OutputError, match="did not make"):
            check_output(folder, force=True)


def test_a_failed_proof_leaves_the_old_package(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    with staged_package(folder, {"a": b"old"}):
        pass
    with pytest.raises(RuntimeError, match="wrong"), staged_package(folder, {"a": b"new"}) as staging:
        assert (staging / "a").read_bytes() == b"new"
        raise RuntimeError("wrong")
    assert (folder / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    with staged_package(tmp_path / "p", {"a": b"1"}) as staging:
        prefix = staging.parent.name.rpartition("-")[0]
    (tmp_path / f"{prefix}-killed").mkdir()
    with staged_package(tmp_path / "p", {"a": b"1"}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_hidden_siblings_are_left_alone(tmp_path: Path) -> None:
    for sibling in (".emacs.d", ".emacs.", ".invpool-mine"):
        (tmp_path / sibling).mkdir()
    with staged_package(tmp_path / "emacs", {"a": b"1"}):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".emacs.", ".emacs.d", ".invpool-mine", "emacs"]


def test_packages_whose_names_start_alike_are_staged_side_by_side(tmp_path: Path) -> None:
    with staged_package(tmp_path / "p.q", {"a": b"1"}) as staging:
        with staged_package(tmp_path / "p", {"a": b"2"}):
            pass
        assert (staging / "a").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "p.q"]


@pytest.mark.parametrize("failure", [OSError("the disk went away"), KeyboardInterrupt()])
def test_a_failed_move_puts_the_old_package_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    folder = tmp_path / "p"
    with staged_package(folder, {"a": b"old"}):
        pass
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise failure
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((OutputError, KeyboardInterrupt)), staged_package(folder, {"a": b"new"}):
        pass
    assert (folder / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_relative_output_lands_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with staged_package(Path("p"), {"a": b"1"}):
        os.chdir("elsewhere")
    assert (tmp_path / "p" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["", ".", "..", "a/..", "/"])
def test_an_output_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match=r"does not name a folder of its own; type one, such as --out build/pool"):
        check_output(Path(name), force=True)


@pytest.mark.parametrize(
    ("targets", "capability", "chosen"),
    [
        (["sm_80", "sm_86", "sm_90", "compute_75"], (8, 0), "sm_80"),
        (["sm_80", "sm_86", "sm_90", "compute_75"], (8, 9), "sm_86"),
        (["sm_80", "sm_86", "sm_90", "compute_75"], (9, 0), "sm_90"),
        (["sm_90", "sm_90a"], (9, 0), "sm_90a"),
        (["sm_90a", "compute_75"], (10, 0), "compute_75"),
        (["sm_86", "compute_75"], (8, 0), "compute_75"),
        (["sm_100", "sm_120", "compute_75"], (10, 3), "sm_100"),
        (["sm_80"], (9, 0), None),
        (["sm_90"], (8, 0), None),
        (["compute_80"], (7, 5), None),
    ],
)
def test_which_code_a_gpu_gets(targets: list[str], capability: tuple[int, int], chosen: str | None) -> None:
    assert choose_image(targets, capability) == chosen
