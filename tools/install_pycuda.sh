#!/usr/bin/env bash
# Builds PyCUDA for an interpreter on a machine with a CUDA toolkit but no driver: it needs cuda.h, and a libcuda to
# link against, for which an empty one serves. Takes about 100 s. Usage: install_pycuda.sh path/to/python
set -euo pipefail
python=$1
"$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('pycuda') is None)" && exit 0
nvcc=$("$python" -c "from invpool.compile import find_nvcc; print(find_nvcc().resolve())")
# A wrapper script on PATH stands for the toolkit it calls.
root=$(dirname "$(dirname "$nvcc")")
[ -e "$root/include/cuda.h" ] || root=/usr/local/cuda
[ -e "$root/include/cuda.h" ] || { echo "cuda.h was found neither beside $nvcc nor in $root/include" >&2; exit 1; }
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
echo 'int invpool_stub;' | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so"
CUDA_ROOT=$root CPATH=$root/include LIBRARY_PATH=$stub "$python" -m pip install --quiet \
  "--config-settings=--global-option=--conf:CUDA_ENABLE_CURAND=False" "pycuda>=2025.1"
