"""From a spec and a plan to one self-contained, readable .cu file with reproducible bytes."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import jinja2

from invpool._version import __version__
from invpool.abi import Direction, parameter_list
from invpool.algorithms import Algorithm, Plan
from invpool.errors import TemplateError
from invpool.spec import PoolSpec

# Another template tree, for experiments and tests; it must hold every template that is used.
TEMPLATES_VARIABLE: Final = "INVPOOL_TEMPLATES"

_ELEMENT: Final = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
# Ours are inlined; the angle-bracket ones belong to the toolkit.
_QUOTED_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*\n?', re.MULTILINE)


def template_root() -> Traversable:
    """The tree that templates are read from: ``$INVPOOL_TEMPLATES``, else the package's own."""
    override = os.environ.get(TEMPLATES_VARIABLE)
    return Path(override) if override else importlib.resources.files("invpool") / "templates"


def _read(name: str) -> str:
    file = template_root()
    for part in name.split("/"):
        file = file / part
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TemplateError(f"template {name} cannot be read from {template_root()}: {error}") from error


def _template_source(name: str) -> str | None:
    """What Jinja's loader asks for; None makes it raise TemplateNotFound."""
    try:
        return _read(name)
    except TemplateError:
        return None


def inline_header(*names: str) -> str:
    """The text of plain ``.cuh`` files, with what they include in quotes put in its place, each file once.

    Raises:
        TemplateError: a file is missing.
    """
    seen: set[str] = set()

    def expand(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        folder = path.rpartition("/")[0]
        return _QUOTED_INCLUDE.sub(lambda match: expand(f"{folder}/{match[1]}" if folder else match[1]), _read(path))

    return "\n".join(filter(None, map(expand, names)))


def _as_comment(text: str) -> str:
    return "\n".join(f"// {line}".rstrip() for line in text.strip().splitlines())


def environment() -> jinja2.Environment:
    """The one Jinja environment: a name that the context lacks is an error, never an empty string."""
    env = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_source),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["comment"] = _as_comment
    env.globals["cuh"] = inline_header
    return env


def render_template(name: str, context: Mapping[str, Any]) -> str:
    """Renders one template of the tree.

    Raises:
        TemplateError: a template is missing or malformed, or uses a name that ``context`` lacks.
    """
    try:
        return environment().get_template(name).render(context)
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"template {error.name} is not in {template_root()}") from error
    except jinja2.UndefinedError as error:
        raise TemplateError(f"template {name}: {error.message}") from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"template {error.name or name}, line {error.lineno}: {error.message}") from error


def template_name(algorithm: Algorithm[Any], direction: Direction) -> str:
    return f"{algorithm.name}/{direction}.cu.j2"


def entry_name(algorithm: Algorithm[Any], spec: PoolSpec, direction: Direction) -> str:
    """The kernel's ``extern "C"`` name."""
    return f"{algorithm.name}_{direction}_{spec.slug}"


def kernel_context(algorithm: Algorithm[Any], spec: PoolSpec, plan: Plan) -> dict[str, Any]:
    """Everything that a kernel template may name."""
    launch = algorithm.launch(spec, plan)
    variate_major = spec.layout == "bhk"
    problem = f"x[B,{'H,K' if variate_major else 'K,H'}], H={spec.H}, K={spec.K}, {spec.dtype}, {spec.precision}"
    return {
        "version": __version__,
        "template": template_name(algorithm, plan.direction),
        "algorithm": algorithm.name,
        "direction": plan.direction,
        "problem": problem + (", masked" if spec.masked else ""),
        "plan_text": str(plan),
        "regenerate": f"invpool generate {spec.cli_arguments()} --algorithm {algorithm.name}",
        "H": spec.H,
        "K": spec.K,
        "layout": spec.layout,
        "masked": spec.masked,
        "element": _ELEMENT[spec.dtype],
        "element_bytes": spec.element_bytes,
        "scalar": _ELEMENT[spec.scalar],
        "scalar_bytes": spec.scalar_bytes,
        "input_stride_h": spec.K if variate_major else 1,
        "input_stride_k": 1 if variate_major else spec.H,
        "threads": launch.threads,
        "grid_text": launch.grid_text,
        "shared_bytes": launch.shared_bytes,
        "regions": algorithm.layout(spec, plan).regions,
        "entry": entry_name(algorithm, spec, plan.direction),
        "parameters": parameter_list(plan.direction, algorithm.state(spec)),
        **algorithm.context(spec, plan),
    }


def render_kernel(algorithm: Algorithm[Any], spec: PoolSpec, plan: Plan) -> str:
    """The CUDA source of one (spec, plan): the same bytes on every machine, every day.

    Raises:
        TemplateError: see :func:`render_template`.
    """
    text = render_template(template_name(algorithm, plan.direction), kernel_context(algorithm, spec, plan))
    # Blocks that render to nothing leave runs of blank lines behind.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def source_digest(algorithm: Algorithm[Any], spec: PoolSpec, plan: Plan) -> str:
    """16 hex digits of sha256 over the kernel's source but for comments: what a measured time belongs to.

    It sees an edit of a template or of what a template is given, two includes deep, and no edit of a comment.
    """
    lines = (line.partition("//")[0].rstrip() for line in render_kernel(algorithm, spec, plan).splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]
