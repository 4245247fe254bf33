#!/bin/sh
# Installs llmctl and what it needs, every file checked against its hash in a lock:
#
#   sh locks/install.sh PYTHON [-e] [EXTRA ...]
#
# PYTHON is the interpreter of a virtual environment. With -e the checkout itself is what is imported.
# An EXTRA is one of pyproject.toml's that has a lock beside this script. `engines`, and each that needs it, brings torch.
# LLMCTL_WHEEL names a wheel to install in place of the checkout.
#
# uv, the one of tools.txt, installs what locks name, in a fifth of pip's time. It does not read pip's configuration.
# So pip does the work where that names an index, or where uv fails. pip alone installs torch, which an index or a
# folder of pip's may have for CPUs.
set -eu
here=$(dirname "$0")
python=$1
shift
editable=
engines=
bytecode=--compile-bytecode # who runs what is installed may not be able to write it
if [ "${1-}" = -e ]; then
    editable=-e
    bytecode=
    shift
fi
for extra in "$@"; do
    if ! [ -f "$here/$extra.txt" ]; then
        echo "locks/install.sh: there is no locks/$extra.txt; an extra without a lock cannot be installed from here" >&2
        exit 2
    fi
    if [ "$extra" = engines ] || grep -q '^# Beside engines.txt' "$here/$extra.txt"; then
        engines=yes
    fi
done

# No resolver runs: a lock is whole. What has no wheel is built without isolation, with what build.txt has installed.
pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation "$@"
}

# Installs from lock files, each given after -r.
install() {
    if [ "$uv" ]; then
        "$uv" pip install --quiet --python "$python" $bytecode --no-deps --no-build-isolation --require-hashes "$@" && return
        echo "uv could not install this; pip goes on, more slowly" >&2
        uv=
    fi
    pip_install --require-hashes "$@"
}

echo "installing what locks/ names${engines:+: torch and others, some minutes the first time}"
uv=
case $("$python" -m pip config list) in
*.index-url=* | *.no-index=*) ;;
*)
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    pip_install --require-hashes --target "$tools" -r "$here/tools.txt" && uv=$tools/bin/uv ||
        echo "uv could not be installed; pip goes on, more slowly" >&2
    ;;
esac
install -r "$here/build.txt" -r "$here/run.txt"

if [ "$engines" ]; then
    # torch for CPUs where an index of this machine has it, else the registry's, which needs CUDA's libraries.
    pip_install --require-hashes -r "$here/torch-cpu.txt" 2>/dev/null || pip_install --require-hashes -r "$here/torch.txt"
    needs_cuda="import sys, importlib.metadata as m; sys.exit(not any(r.startswith('nvidia') for r in m.requires('torch')))"
    if "$python" -c "$needs_cuda"; then
        install -r "$here/cuda.txt"
    fi
    install -r "$here/engines.txt"
fi
for extra in "$@"; do
    [ "$extra" = engines ] || install -r "$here/$extra.txt"
done
pip_install ${editable:+"$editable"} "${LLMCTL_WHEEL:-$here/..}"
